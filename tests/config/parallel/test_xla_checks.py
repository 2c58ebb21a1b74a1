"""The names that ask for PyTorch/XLA where it is not installed; tests/xla has them where it is."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest

from windlass import TrainingArguments
from windlass.cli.launching.launch import resolve_launch
from windlass.cli.launching.launch_flags import add_launch_flags
from windlass.config.parallel.keys import Settings, merge
from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.config.parallel.sources import from_arguments
from windlass.core import xla
from windlass.core.errors import ConfigError
from windlass.core.world import World
from windlass.recipes.from_files import from_document

absent = pytest.mark.skipif(xla.is_selected(), reason="torch_xla is installed")


def problems(settings: Settings) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_parallel(settings, World())
    return str(raised.value)


def sharded(**config: Any) -> Settings:
    """The settings of arguments that are checked when they are assigned, and not when they are made."""
    args = TrainingArguments("out")
    args.fsdp, args.fsdp_config = "full_shard", config
    return from_arguments(args)


@absent
@pytest.mark.parametrize("kind", ["XLA", "TPU"])
def test_a_launch_file_for_it_is_refused_with_the_versions_to_install(kind: str) -> None:
    found = problems(from_document({"distributed_type": kind}, "default.yaml"))
    assert "distributed_type in default.yaml" in found
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in found


@absent
def test_sharding_on_it_is_refused_with_the_versions_to_install() -> None:
    found = problems(sharded(xla=True))
    assert "fsdp_config.xla=True" in found
    assert "torch_xla==2.9.0" in found


@absent
@pytest.mark.parametrize("options", [{"tpu_num_cores": 8}, {"optim": "adamw_torch_xla"}])
def test_arguments_for_it_are_refused_with_the_versions_to_install(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}=.*torch_xla==2\.9\.0"):
        TrainingArguments("out", **options)


def test_its_options_need_it() -> None:
    found = problems(sharded(xla_fsdp_grad_ckpt=True, xla_fsdp_settings={"flatten_parameters": True}))
    assert found.count("has an effect only with xla=True") == 2


def test_each_option_of_its_wrapper_is_known_refused_or_corrected() -> None:
    options = {
        "compute_dtype": "bfloat16",
        "sharding_rank": 1,
        "flaten_parameters": True,
        "fp32_reduce_scatter": True,
    }
    found = problems(sharded(xla=True, xla_fsdp_settings=options))
    assert "xla_fsdp_settings.compute_dtype='bfloat16': under PyTorch/XLA the precision decides" in found
    assert "xla_fsdp_settings.sharding_rank=1: belongs to one process per device" in found
    assert "did you mean 'flatten_parameters'" in found
    assert "fp32_reduce_scatter" not in found


def test_every_option_of_its_wrapper_is_known() -> None:
    """The arguments that its constructor has, at their defaults; functions cannot be in a file."""
    wrapper = pytest.importorskip("torch_xla.distributed.fsdp", reason="needs torch_xla: make test-xla")
    found = inspect.signature(wrapper.XlaFullyShardedDataParallel.__init__).parameters
    public = {name: one.default for name, one in found.items() if not name.startswith("_")}
    functions = {name for name in public if name.endswith(("_policy", "_callable", "_fn"))}
    options = {name: value for name, value in public.items() if name not in ("self", "module", *functions)}
    assert len(options) > 10
    plan_parallel(sharded(xla=True, xla_fsdp_settings=options), World())
    for name in functions:
        assert "name the layers by" in problems(sharded(xla=True, xla_fsdp_settings={name: "f"}))


def test_a_file_that_asks_for_it_and_a_script_that_refuses_accelerators_contradict_each_other() -> None:
    file = from_document({"distributed_type": "XLA"}, "default.yaml")
    script = from_arguments(TrainingArguments("out", use_cpu=True))
    found = problems(merge(script, file))
    assert ("contradicts TrainingArguments.use_cpu" in found) == xla.is_selected()


@absent
def test_the_launcher_refuses_it_before_a_process_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    parser = argparse.ArgumentParser()
    add_launch_flags(parser)
    options = parser.parse_args(["--tpu", str(script)])
    with pytest.raises(ConfigError, match=r"--tpu=True: needs PyTorch/XLA.*torch_xla==2\.9\.0"):
        resolve_launch(options, {})
