"""What a script says to `Accelerator(...)`."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin
from windlass.compat.plugins import DistributedDataParallelKwargs, ParallelismConfig, TorchDynamoPlugin
from windlass.config.parallel.keys import merge
from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.config.parallel.sources import from_environment, from_plugins
from windlass.config.plan import CompilePlan, ShardPlan
from windlass.core.errors import ConfigError
from windlass.core.world import World

TWO = World(0, 2, 0, 2)


def test_plugins_become_the_plan() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=False, cpu_offload=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"], mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": "fp32"},
        state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    plan = plan_parallel(from_plugins({"fsdp_plugin": plugin, "gradient_accumulation_steps": 3}), TWO)
    assert plan.accumulation == 3
    assert plan.dist.shard == ShardPlan(
        reshard=False, wrap="transformer", layers=("Block",), cpu_offload=True, param_dtype="bf16",
        reduce_dtype="fp32", state="sharded",
    )  # fmt: skip


def test_what_constructors_hold_unasked_gives_way_to_the_launcher() -> None:
    script = from_plugins({"mixed_precision": None, "gradient_accumulation_steps": 1, "cpu": False})
    launcher = from_environment({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                                 "ACCELERATE_USE_CPU": "true"})  # fmt: skip
    plan = plan_parallel(merge(script, launcher), TWO)
    assert (plan.precision.compute, plan.accumulation, plan.use_cpu) == ("bf16", 4, True)


def test_a_plugin_that_says_nothing_takes_the_launchers_options() -> None:
    script = from_plugins({"fsdp_plugin": FullyShardedDataParallelPlugin()})
    launcher = from_environment({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"})
    shard = plan_parallel(merge(script, launcher), TWO).dist.shard
    assert shard is not None
    assert shard.cpu_offload


def test_contradictions_name_the_argument() -> None:
    script = from_plugins(
        {"mixed_precision": "bf16", "fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=False)}
    )
    environ = {
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    with pytest.raises(ConfigError) as error:
        plan_parallel(merge(script, from_environment(environ)), TWO)
    said = str(error.value)
    assert "Accelerator(mixed_precision=)='bf16': contradicts ACCELERATE_MIXED_PRECISION='fp16'" in said
    assert "Accelerator(fsdp_plugin=).cpu_offload=False: contradicts FSDP_OFFLOAD_PARAMS=True" in said


def test_the_other_plugins() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16")  # type: ignore[arg-type]
    settings = from_plugins({"ddp_kwargs": handler, "dynamo_plugin": TorchDynamoPlugin(backend="INDUCTOR")})  # type: ignore[arg-type]
    plan = plan_parallel(settings, TWO)
    assert (plan.dist.find_unused_parameters, plan.dist.comm_hook) == (True, "fp16")
    assert plan.compile == CompilePlan("inductor")
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    shard = plan_parallel(from_plugins({"parallelism_config": mesh}), World(0, 4, 0, 4)).dist.shard
    assert shard is not None
    assert shard.replicas == 2


def test_how_models_are_compiled() -> None:
    plugin = TorchDynamoPlugin(
        backend="eager", fullgraph=True, dynamic=True, options={"level": 3}, use_regional_compilation=True
    )  # type: ignore[arg-type]
    compiled = plan_parallel(from_plugins({"dynamo_plugin": plugin}), World()).compile
    assert compiled == CompilePlan("eager", blocks=True, fullgraph=True, dynamic=True, options={"level": 3})
    plugin.disable = True
    assert plan_parallel(from_plugins({"dynamo_plugin": plugin}), World()).compile is None


@pytest.mark.parametrize("name", ["megatron_lm_plugin"])
def test_engines_that_are_not_built_are_refused_by_argument(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*not built"):
        plan_parallel(from_plugins({name: object()}), TWO)


@pytest.mark.parametrize(
    ("name", "plugin", "field"),
    [
        ("ddp_kwargs", DistributedDataParallelKwargs(comm_wrapper="power_sgd"), "comm_wrapper"),
        ("ddp_kwargs", DistributedDataParallelKwargs(bucket_cap_mb=0), "bucket_cap_mb"),
        ("ddp_kwargs", DistributedDataParallelKwargs(static_graph="perhaps"), "static_graph"),
        ("dynamo_plugin", TorchDynamoPlugin(mode="fast"), "mode"),
        ("dynamo_plugin", TorchDynamoPlugin(fullgraph="perhaps"), "fullgraph"),
        ("dynamo_plugin", TorchDynamoPlugin(options=3), "options"),
    ],
)  # fmt: skip
def test_settings_of_plugins_are_checked_by_the_table_and_reported_once(
    name: str, plugin: Any, field: str
) -> None:
    (problem,) = [*plugin.objections(), *from_plugins({name: plugin}).problems]
    assert problem.field == f"Accelerator({name}=).{field}"
