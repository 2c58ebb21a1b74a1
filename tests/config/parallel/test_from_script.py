"""What a script's arguments say about spreading."""

from __future__ import annotations

from typing import Any

import pytest

from windlass import TrainingArguments
from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.config.parallel.sources import from_arguments, shard_options
from windlass.config.plan import ShardPlan
from windlass.core.errors import ConfigError
from windlass.core.world import World

TWO = World(0, 2, 0, 2)


def shard(world: World = TWO, **arguments: Any) -> ShardPlan:
    plan = plan_parallel(from_arguments(TrainingArguments("out", **arguments)), world).dist
    assert plan.strategy == "fsdp"
    assert plan.shard is not None
    return plan.shard


def test_arguments_at_their_defaults_mean_plain_replication() -> None:
    plan = plan_parallel(from_arguments(TrainingArguments("out")), TWO)
    assert (plan.dist.strategy, plan.dist.shard, plan.precision.compute) == ("ddp", None, "fp32")
    assert not any(said.implicit is False for said in plan.settings.values() if said.key != "accumulation")


@pytest.mark.parametrize(("fsdp", "options"), [
    (True, []), ("true", []), ("", None), (False, None), (None, None), ([], None), ("False", None),
    ("full_shard auto_wrap", ["full_shard", "auto_wrap"]), (["offload"], ["offload"]),
    ("full_shard,offload", ["full_shard", "offload"]), ("full shard", ["full_shard"]),
    ("hybrid shard zero2 auto wrap", ["hybrid_shard_zero2", "auto_wrap"]),
])  # fmt: skip
def test_the_many_ways_to_switch_it_on(fsdp: Any, options: list[str] | None) -> None:
    assert shard_options(fsdp) == options


def test_the_guides_words_map_onto_fsdp2() -> None:
    assert shard(fsdp="full_shard auto_wrap offload") == ShardPlan(wrap="transformer", cpu_offload=True)
    assert shard(fsdp="shard_grad_op").reshard is False
    assert shard(fsdp="no_shard").replicas == 2
    four = World(0, 4, 0, 2)
    assert shard(four, fsdp="hybrid_shard").replicas == 2
    assert (
        shard(four, fsdp="hybrid_shard_zero2").replicas,
        shard(four, fsdp="hybrid_shard_zero2").reshard,
    ) == (2, False)


def test_options_may_repeat_the_prefix_and_be_of_either_version() -> None:
    one = {
        "version": 1, "fsdp_reshard_after_forward": "shard_grad_op", "backward_prefetch": "backward_pre",
        "forward_prefetch": True, "use_orig_params": True, "sync_module_states": True, "limit_all_gathers": True,
        "transformer_layer_cls_to_wrap": ["Block"], "state_dict_type": "SHARDED_STATE_DICT",
    }  # fmt: skip
    assert shard(fsdp=True, fsdp_config=one) == ShardPlan(
        reshard=False, wrap="transformer", layers=("Block",), forward_prefetch=1, state="sharded"
    )
    two = {
        "version": 2, "reshard_after_forward": False, "cpu_offload": True, "activation_checkpointing": True,
        "activation_checkpointing_offload": True, "cpu_ram_efficient_loading": True,
        "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5, "xla": False,
    }  # fmt: skip
    assert shard(fsdp=True, fsdp_config=two) == ShardPlan(
        reshard=False,
        wrap="size",
        min_parameters=5,
        cpu_offload=True,
        recompute=True,
        recompute_offload=True,
        ram_efficient=True,
    )


def test_what_wrapping_goes_by_follows_from_what_was_said() -> None:
    assert shard(fsdp=True).wrap == "transformer"
    assert shard(fsdp=True, fsdp_config={"min_num_params": 7}).wrap == "size"
    assert shard(fsdp=True, fsdp_config={"min_num_params": 7, "auto_wrap_policy": "NO_WRAP"}).wrap == "none"


def test_precision_sets_the_dtype_of_gathered_parameters() -> None:
    plan = shard(fsdp=True, bf16=True)
    assert (plan.param_dtype, plan.reduce_dtype) == ("bf16", "fp32")


def test_meshes_give_copies_and_shards() -> None:
    four = World(0, 4, 0, 4)
    mesh = {"dp_replicate_size": 2, "dp_shard_size": 2}
    assert shard(four, parallelism_config=mesh).replicas == 2
    with pytest.raises(ConfigError, match="4 processes, and there are 2"):
        shard(TWO, parallelism_config=mesh)


@pytest.mark.parametrize(("arguments", "field", "words"), [
    ({"fsdp": "full_shard nonsense"}, "fsdp", "nonsense"),
    ({"fsdp": True, "fsdp_config": {"xla": True}}, "fsdp_config.xla", "XLA"),
    ({"fsdp": True, "fsdp_config": {"ofload_params": True}}, "fsdp_config.ofload_params", "offload_params"),
    ({"fsdp": True, "fsdp_config": {"state_dict_type": "LOCAL_STATE_DICT"}}, "fsdp_config.state_dict_type", "SHARDED"),
    ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": True},
     "fsdp_config.activation_checkpointing", "twice"),
    ({"parallelism_config": {"pp_size": 2, "pp_schedule": "1f2b"}}, "parallelism_config.pp_schedule", "1f1b"),
    ({"parallelism_config": {"pp_size": 2, "pp_handler": {"pp_schedule": "1f2b"}}}, "parallelism_config.pp_schedule",
     "1f1b"),
    ({"parallelism_config": {"cp_handler": {"cp_way": 1}}}, "parallelism_config.cp_way", "there is no such option"),
    ({"parallelism_config": 5}, "parallelism_config", "mapping"),
])  # fmt: skip
def test_refused_when_arguments_are_made(arguments: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        TrainingArguments("out", **arguments)
    assert [problem.field for problem in error.value.problems] == [field]


def test_options_of_sharding_that_is_off_are_refused_when_a_run_is_planned() -> None:
    args = TrainingArguments("out", fsdp_config={"cpu_offload": True})
    with pytest.raises(ConfigError, match="sharding is off"):
        plan_parallel(from_arguments(args), TWO)


def test_sharding_said_twice_must_be_the_same() -> None:
    args = TrainingArguments("out", fsdp="shard_grad_op", fsdp_config={"reshard_after_forward": True})
    with pytest.raises(ConfigError, match="reshard_after_forward=True: contradicts"):
        plan_parallel(from_arguments(args), TWO)
