"""Settings that launchers put into the environment: Windlass's own, and those of the real accelerate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.versions import needs

from windlass import TrainingArguments
from windlass.config.parallel.keys import merge
from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.config.parallel.sources import from_arguments, from_environment, from_flags, to_environment
from windlass.config.plan import CompilePlan, ShardPlan
from windlass.core.errors import ConfigError
from windlass.core.world import World

TWO = World(0, 2, 0, 2)


def of_accelerate(*flags: str) -> dict[str, str]:
    """What `accelerate launch` puts into the environment of its processes."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    usual = [
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        "0",
        "--dynamo_backend",
        "no",
    ]
    words = [*usual, "--mixed_precision", "no", "--num_cpu_threads_per_process", "1", *flags, "script.py"]
    environ: dict[str, str] = prepare_multi_gpu_env(launch_command_parser().parse_args(words))
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(("ACCELERATE", "FSDP", "PARALLELISM"))
    }


def planned(environ: dict[str, str], world: World = TWO, **arguments: Any) -> Any:
    script = from_arguments(TrainingArguments("out", **arguments))
    return plan_parallel(merge(script, from_environment(environ)), world)


def test_what_accelerate_exports_unasked_says_nothing() -> None:
    plan = planned(of_accelerate(), bf16=True, torch_compile=True)
    assert (plan.dist.strategy, plan.precision.compute, plan.compile) == ("ddp", "bf16", CompilePlan())


def test_flags_of_the_real_accelerate_arrive() -> None:
    environ = of_accelerate(
        "--use_fsdp", "--mixed_precision", "bf16", "--fsdp_sharding_strategy", "2", "--fsdp_offload_params", "true",
        "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Block,Head",
        "--fsdp_state_dict_type", "SHARDED_STATE_DICT", "--fsdp_forward_prefetch", "true",
        "--fsdp_backward_prefetch", "BACKWARD_PRE", "--fsdp_activation_checkpointing", "true",
        "--dynamo_backend", "aot_eager", "--dynamo_use_fullgraph", "--dynamo_use_dynamic",
    )  # fmt: skip
    plan = planned(environ | {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"})
    assert plan.compile == CompilePlan("aot_eager", fullgraph=True, dynamic=True)
    assert plan.dist.shard == ShardPlan(
        reshard=False, wrap="transformer", layers=("Block", "Head"), cpu_offload=True, param_dtype="bf16",
        reduce_dtype="fp32", forward_prefetch=1, recompute=True, recompute_offload=True, state="sharded",
        # Models that transformers loads under this launcher hold weights on the first rank only.
        ram_efficient=True,
    )  # fmt: skip


@needs("accelerate", "1.10", "older ones have no flags of meshes")
def test_the_second_version_and_meshes_of_the_real_accelerate_arrive() -> None:
    environ = of_accelerate(
        "--use_fsdp", "--fsdp_version", "2", "--fsdp_reshard_after_forward", "false", "--use_parallelism_config",
        "--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2",
    )  # fmt: skip
    plan = planned(environ, World(0, 4, 0, 4))
    assert (plan.dist.shard.reshard, plan.dist.shard.replicas) == (False, 2)


def test_variables_without_their_switch_are_not_read() -> None:
    assert planned({"FSDP_OFFLOAD_PARAMS": "true", "PARALLELISM_CONFIG_TP_SIZE": "8"}).dist.strategy == "ddp"


@pytest.mark.parametrize(("environ", "words"), [
    ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "tape"}, "OFFLOAD_PARAM_DEVICE"),
    ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
      "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, "offload_param.nvme_path.*needs nvme_path"),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
    ({"ACCELERATE_USE_SAGEMAKER": "true"}, "SageMaker"),
    ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"}, "Transformer Engine"),
    ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_OPT_LEVEL": "O1"}, "MS-AMP"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
     "CHECKPOINTING_OFFLOAD.*only with activation_checkpointing"),
    ({"ACCELERATE_USE_CPU": "perhaps"}, "ACCELERATE_USE_CPU"),
    ({"ACCELERATE_TORCH_DEVICE": "cuda:1"}, "ACCELERATE_TORCH_DEVICE"),
    (of_accelerate("--enable_cpu_affinity"), "ACCELERATE_CPU_AFFINITY"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(environ)


def test_script_and_launcher_are_both_named_and_all_at_once() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    with pytest.raises(ConfigError) as error:
        planned(environ, bf16=True, gradient_accumulation_steps=2)
    said = str(error.value)
    assert len(error.value.problems) == 2
    for word in ("TrainingArguments.bf16", "ACCELERATE_MIXED_PRECISION", "steps=2", "ACCUMULATION_STEPS=4"):
        assert word in said


def test_the_own_variable_carries_everything_with_its_origin() -> None:
    said = from_flags(
        {"use_fsdp": True, "fsdp_transformer_layer_cls_to_wrap": "A,B", "num_processes": "2", "cpu": True}
    )
    environ = {"WINDLASS_PARALLEL": to_environment(said), "ACCELERATE_MIXED_PRECISION": "fp16"}
    back = from_environment(environ)
    assert set(back) == {"strategy", "fsdp.layers", "cpu"}
    for name, setting in back.items():
        assert (setting.value, setting.origin, setting.implicit) == (
            said[name].value,
            said[name].origin,
            False,
        )
    plan = plan_parallel(back, TWO)
    assert plan.use_cpu
    assert plan.dist.shard == ShardPlan(wrap="transformer", layers=("A", "B"))


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"no.such": [1, "x"]}), json.dumps({"cpu": 3})])
def test_an_own_variable_that_was_tampered_with_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="WINDLASS_PARALLEL"):
        from_environment({"WINDLASS_PARALLEL": text})


def test_arguments_follow_a_launcher_that_wants_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert TrainingArguments("out").device.type == "cpu"
