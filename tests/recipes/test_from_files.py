"""Launch files: the four that guides print, and what `accelerate config` writes."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.config.plan import ShardPlan
from windlass.core.errors import ConfigError
from windlass.core.world import World
from windlass.recipes.from_files import find_file, from_document, from_file, from_recipe

COMMON = """\
compute_environment: LOCAL_MACHINE
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
TWO_MACHINES = (
    COMMON
    + """\
distributed_type: MULTI_GPU
gpu_ids: all
main_process_ip: 192.168.20.1
main_process_port: 9898
mixed_precision: fp16
num_machines: 2
num_processes: 8
"""
)
SHARDED = (
    COMMON
    + """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
)
DEEPSPEED_FILE = (
    COMMON
    + """\
deepspeed_config:
  deepspeed_config_file: configs/ds_zero3_config.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 4
"""
)
DEEPSPEED_FIELDS = (
    COMMON
    + """\
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 0.7
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
)
GUIDES = {"machines": TWO_MACHINES, "sharded": SHARDED, "file": DEEPSPEED_FILE, "fields": DEEPSPEED_FIELDS}


@pytest.mark.parametrize("name", GUIDES)
def test_the_guides_files_have_no_key_that_is_unknown(name: str) -> None:
    settings = from_document(yaml.safe_load(GUIDES[name]), "guide.yaml")
    assert not [note for note in settings.notes if "means nothing here" in note]
    absent = ["deepspeed_config.deepspeed_config_file in guide.yaml"] * (name == "file")
    assert [problem.field for problem in settings.problems] == absent
    assert settings["launch.processes"].value == yaml.safe_load(GUIDES[name])["num_processes"]


PAGES = Path(__file__).resolve().parents[3] / "shared" / "guides"
BLOCK = re.compile(r"^( *)```ya?ml\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def printed_files() -> list[dict[str, Any]]:
    """The launch files in the guides, as printed: one page has lost the indentation of its sections."""
    texts = [page.read_text("utf-8") for page in sorted(PAGES.glob("*.txt"))]
    return [yaml.safe_load(textwrap.dedent(body)) for text in texts for _, body in BLOCK.findall(text)]


@pytest.mark.skipif(not PAGES.is_dir(), reason="the guides are not beside this checkout")
def test_the_guides_files_as_printed(tmp_path: Path) -> None:
    config = tmp_path / "ds_zero3_config.json"
    config.write_text('{"zero_optimization": {"stage": 3}}')
    plans = []
    for file in printed_files():
        for part in (file, file.get("deepspeed_config") or {}):
            if "deepspeed_config_file" in part:  # a path of the guides' author
                part["deepspeed_config_file"] = str(config)
        settings = from_document(file, "guide.yaml")
        assert not settings.problems
        assert not [note for note in settings.notes if "means nothing here" in note]
        plans.append(plan_parallel(settings, World(0, file["num_processes"], 0, 4)))
    engines = [plan.dist.strategy for plan in plans]
    assert engines == ["ddp", "fsdp", "deepspeed", "deepspeed"] * 2
    said = [
        (plan.dist.shard, plan.dist.zero and plan.dist.zero.config, plan.precision, plan.accumulation)
        for plan in plans
    ]
    assert said[:4] == said[4:]  # with the indentation and without it
    stages = [plan.dist.zero.config["zero_optimization"]["stage"] for plan in plans[2:4]]
    assert stages == [3, 2]
    assert plans[3].dist.zero.config["gradient_clipping"] == 0.7


def test_the_guides_words_for_several_machines() -> None:
    settings = from_document(yaml.safe_load(TWO_MACHINES), "guide.yaml")
    values = {name.removeprefix("launch."): said.value for name, said in settings.items()}
    assert values["machines"] == 2
    assert (values["main_address"], values["main_port"]) == ("192.168.20.1", 9898)
    plan = plan_parallel(settings, World(0, 8, 0, 4))
    assert (plan.dist.strategy, plan.precision.compute) == ("ddp", "fp16")


def test_the_guides_words_for_sharding() -> None:
    plan = plan_parallel(from_document(yaml.safe_load(SHARDED), "guide.yaml"), World(0, 2, 0, 2))
    assert plan.dist.shard == ShardPlan(
        wrap="transformer", layers=("BertLayer",), forward_prefetch=1, param_dtype="bf16", reduce_dtype="fp32",
        state="full",
    )  # fmt: skip


def test_a_file_that_accelerate_config_wrote_is_read_whole(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    needed: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
        "use_cpu": False, "debug": False,
    }  # fmt: skip
    config = ClusterConfig(
        **needed, num_processes=2, fsdp_config={"fsdp_version": 2, "fsdp_offload_params": True}
    )
    path = tmp_path / "theirs.yaml"
    config.to_yaml_file(path)
    assert "tpu_use_sudo" in path.read_text()
    settings = from_file(path)
    assert settings.problems == []
    assert settings.notes == []
    shard = plan_parallel(settings, World(0, 2, 0, 2)).dist.shard
    assert shard == ShardPlan(cpu_offload=True, param_dtype="bf16", reduce_dtype="fp32")


@pytest.mark.parametrize("home", ["~a-user-without-a-home", "/" + "x" * 300])
def test_a_user_who_cannot_enter_a_home_has_no_file_there(home: str, tmp_path: Path) -> None:
    """The name is too long to look at, as a folder of another user's cannot be."""
    assert find_file({"WINDLASS_HOME": home, "HF_HOME": home}) == (None, "")
    theirs = tmp_path / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir()
    theirs.touch()
    assert find_file({"WINDLASS_HOME": home, "HF_HOME": str(tmp_path)})[0] == theirs


def test_the_real_accelerate_reads_what_we_write(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    from windlass.recipes.from_files import write_file

    path = tmp_path / "ours.yaml"
    write_file(from_document(yaml.safe_load(SHARDED), "guide.yaml"), path)
    config = load_config_from_file(str(path))
    assert dataclasses.asdict(config)["distributed_type"] == "FSDP"
    assert config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "BertLayer"
    again = from_file(path)
    first = from_document(yaml.safe_load(SHARDED), "guide.yaml")
    assert {name: said.value for name, said in again.items()} == {
        name: said.value for name, said in first.items()
    }


def test_unknown_keys_are_named_and_not_fatal() -> None:
    settings = from_document({"num_proceses": 2, "fsdp_config": {"ofload_params": True}}, "my.yaml")
    assert settings.problems == []
    assert len(settings.notes) == 2
    assert "'num_proceses'" in settings.notes[0]
    assert "did you mean 'num_processes'" in settings.notes[0]
    assert "fsdp_config.ofload_params" in settings.notes[1]


def test_wrong_types_are_problems_all_at_once() -> None:
    document = {
        "num_processes": "two", "mixed_precision": "fp12", "use_cpu": "perhaps", "fsdp_config": 3,
        "main_process_port": 99999, "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NONSENSE",
    }  # fmt: skip
    settings = from_document(document, "my.yaml")
    assert {problem.field.partition(" ")[0] for problem in settings.problems} == set(document)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("- a\n", "mapping"), ("a: [", "not valid")]
)
def test_files_that_are_none(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "my.yaml"
    if content is not None:
        path.write_text(content)
    (problem,) = from_file(path).problems
    assert words in str(problem)
    assert str(path) in str(problem)


def test_json_and_old_words_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"fp16": true, "dynamo_backend": "NO", "distributed_type": "NO", "num_processes": 1}')
    settings = from_file(path)
    assert settings.problems == []
    assert settings["precision"].value == "fp16"
    (hours := tmp_path / "slurm.yaml").write_text(
        "engine_options: {time: 1:00:00}\nuse_cpu: yes\nmachine_rank: 010"
    )
    settings = from_file(hours)
    assert settings["launch.engine_options"].value == {"time": "1:00:00"}, "3600 would be minutes"
    assert (settings["cpu"].value, settings["launch.machine_rank"].value) == (True, 10)
    hours.write_text("env: {DAY: 010, NEXT: 1}")
    assert from_file(hours)["launch.environment"].value == {"DAY": "010", "NEXT": "1"}
    hours.write_text('env: {"": x}')
    assert "an environment cannot hold ''" in str(from_file(hours).problems[0])
    for text in ("true", "yes", "1.10", "", "[1]"):
        hours.write_text(f"env: {{WORD: {text}}}")
        assert "WORD has" in str(from_file(hours).problems[0]), "the variable would not be what is written"


def test_sharding_options_of_a_file_without_sharding_are_only_noted(caplog: pytest.LogCaptureFixture) -> None:
    settings = from_document(
        {"fsdp_config": {"offload_params": True}, "distributed_type": "MULTI_GPU"}, "my.yaml"
    )
    assert plan_parallel(settings, World(0, 2, 0, 2)).dist.strategy == "ddp"


def test_a_recipe_says_it_in_canonical_names() -> None:
    settings = from_recipe(
        {"strategy": "fsdp", "fsdp": {"cpu_offload": True, "layers": ["A"]}, "precision": "bf16"}, "r"
    )
    shard = plan_parallel(settings, World()).dist.shard
    assert shard is not None
    assert (shard.cpu_offload, shard.layers) == (True, ("A",))
    with pytest.raises(ConfigError, match=r"did you mean 'fsdp\.cpu_offload'"):
        plan_parallel(from_recipe({"fsdp": {"cpu_ofload": True}}, "r"), World())
