"""What settings come to, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.config.parallel.keys import merge
from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.config.parallel.sources import from_flags
from windlass.core.errors import ConfigError
from windlass.core.mesh import Mesh
from windlass.core.world import World
from windlass.recipes.from_files import from_document

TWO = World(0, 2, 0, 2)
FOUR_ON_TWO_MACHINES = World(0, 4, 0, 2)


def planned(world: World = TWO, **flags: Any) -> Any:
    return plan_parallel(from_flags(flags), world)


@pytest.mark.parametrize(("sharding", "reshard", "replicas"), [
    ("FULL_SHARD", True, 1), ("SHARD_GRAD_OP", False, 1), ("NO_SHARD", False, 4), ("HYBRID_SHARD", True, 2),
    ("HYBRID_SHARD_ZERO2", False, 2), ("1", True, 1), ("2", False, 1), ("3", False, 4), ("4", True, 2), ("5", False, 2),
])  # fmt: skip
def test_every_strategy_of_fsdp1(sharding: str, reshard: bool, replicas: int) -> None:
    # Files of FSDP1's last days put the names into the second option.
    options = ["fsdp_sharding_strategy"] + ["fsdp_reshard_after_forward"] * (not sharding.isdigit())
    for option in options:
        shard = planned(FOUR_ON_TWO_MACHINES, use_fsdp=True, **{option: sharding}).dist.shard
        assert (shard.reshard, shard.replicas) == (reshard, replicas)


@pytest.mark.parametrize(("said", "forward", "backward"), [
    ({"fsdp_forward_prefetch": "true"}, 1, 0), ({"fsdp_forward_prefetch": 3}, 3, 0),
    ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, 0, 0), ({"fsdp_backward_prefetch": 2}, 0, 2),
])  # fmt: skip
def test_prefetch(said: dict[str, Any], forward: int, backward: int) -> None:
    shard = planned(use_fsdp=True, **said).dist.shard
    assert (shard.forward_prefetch, shard.backward_prefetch) == (forward, backward)


@pytest.mark.parametrize(("flags", "words"), [
    ({"fsdp_offload_params": "true"}, "sharding is off"),
    ({"use_fsdp": True, "fsdp_sharding_strategy": "2", "fsdp_reshard_after_forward": "true"}, "contradicts"),
    ({"use_fsdp": True, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "A"},
     "contradicts"),
    ({"use_fsdp": True, "ddp_comm_hook": "fp16"}, "reduce_dtype"),
    ({"use_fsdp": True, "parallelism_config_dp_replicate_size": "3"}, "must divide"),
    ({"parallelism_config_dp_replicate_size": "3"}, "there are 2"),
    ({"strategy": "ddp", "parallelism_config_dp_shard_size": "2"}, "contradicts"),
    ({"use_fsdp": True, "fsdp_offload_params": "true", "mixed_precision": "fp16"}, "use bf16"),
])  # fmt: skip
def test_what_cannot_be(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(**flags)


def test_fp16_on_the_host_alone_needs_no_way_between_devices() -> None:
    flags = {"use_fsdp": True, "fsdp_offload_params": "true", "mixed_precision": "fp16", "cpu": True}
    assert planned(**flags).dist.shard.cpu_offload


def test_what_has_no_meaning_in_fsdp2_is_said_once(said: list[str]) -> None:
    document = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_use_orig_params": False, "fsdp_backward_prefetch": "BACKWARD_POST"},
    }
    for _ in range(2):
        plan_parallel(from_document(document, "my.yaml"), TWO)
    assert len(said) == 2
    assert any("fsdp_use_orig_params" in line and "my.yaml" in line for line in said)
    assert any("backward_post" in line for line in said)


def test_hybrid_sharding_on_one_machine_is_said_to_be_full(said: list[str]) -> None:
    assert planned(use_fsdp=True, fsdp_sharding_strategy="HYBRID_SHARD").dist.shard.replicas == 1
    assert any("one machine" in line for line in said)


def test_flags_go_before_the_file() -> None:
    file = from_document({"distributed_type": "FSDP", "mixed_precision": "fp16"}, "my.yaml")
    plan = plan_parallel(merge(from_flags({"mixed_precision": "bf16"}), file), TWO)
    assert plan.precision.compute == "bf16"
    assert [other.origin for other in plan.settings["precision"].overridden] == ["mixed_precision in my.yaml"]


FOUR = World(0, 4, 0, 4)


def axes(**sizes: int) -> dict[str, str]:
    return {f"parallelism_config_{name}_size": str(size) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("flags", "mesh"),
    [
        (axes(cp=2), Mesh(replicate=2, context=2)),
        (axes(sp=4), Mesh(sequence=4)),
        (axes(cp=2, sp=2), Mesh(context=2, sequence=2)),
        (axes(tp=2, cp=2), Mesh(context=2, tensor=2)),
        (axes(tp=2, dp_replicate=2), Mesh(replicate=2, tensor=2)),
        ({**axes(cp=2), "use_fsdp": True}, Mesh(shard=2, context=2)),
        (axes(cp=2, dp_shard=2), Mesh(shard=2, context=2)),
        (axes(ep=2), Mesh(replicate=2, expert=2)),
        (axes(ep=2, tp=2), Mesh(expert=2, tensor=2)),
        (axes(ep=2, cp=2), Mesh(expert=2, context=2)),
        ({**axes(ep=2, sp=2), "use_fsdp": True}, Mesh(expert=2, sequence=2)),
        (axes(ep=2, dp_replicate=4), Mesh(replicate=2, expert=2)),
        (axes(ep=4, dp_shard=4), Mesh(expert=4)),
        (axes(ep=2, dp_shard=2, dp_replicate=2), Mesh(replicate=2, expert=2)),
        (axes(tp=2, dp_shard=2), Mesh(shard=2, tensor=2)),
        (axes(pp=2, tp=2), Mesh(pipeline=2, tensor=2)),
        (axes(pp=2, dp_shard=2), Mesh(shard=2, pipeline=2)),
        (axes(pp=2, cp=2), Mesh(context=2, pipeline=2)),
        (axes(pp=2, ep=2), Mesh(expert=2, pipeline=2)),
        (
            {**axes(cp=2), "use_fsdp": True, "fsdp_sharding_strategy": "NO_SHARD"},
            Mesh(replicate=2, context=2),
        ),
    ],
)
def test_axes_of_a_model_leave_the_other_processes_to_data(flags: dict[str, Any], mesh: Mesh) -> None:
    dist = planned(FOUR, **flags).dist
    assert dist.mesh(FOUR.size) == mesh


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (axes(cp=3), "cp_size=3: must divide the number of processes, which is 4: start a multiple of 3"),
        (axes(cp=4, tp=2), r"tp_size=2: times --parallelism_config_cp_size=4 must divide"),
        (
            axes(cp=2, dp_replicate=4),
            "4 replicas of 1 shards make 4 processes, and there are 4, 2 to each batch",
        ),
        ({**axes(cp=2), "use_deepspeed": True}, "cp_size=2: is not built together with DeepSpeed"),
        (
            {**axes(sp=2), "dynamo_backend": "inductor"},
            "sp_size=2: is not built together with compiled models",
        ),
        ({**axes(tp=2), "mixed_precision": "fp8"}, "tp_size=2: is not built together with float8"),
        (
            {**axes(pp=2, dp_shard=2), "fsdp_cpu_ram_efficient_loading": True},
            "fsdp_cpu_ram_efficient_loading=True: is not built for pipelines",
        ),
        ({**axes(pp=2), "use_deepspeed": True}, "pp_size=2: is not built together with DeepSpeed"),
        (
            {**axes(pp=2), "parallelism_config_pp_stages_per_process": "2"},
            "pp_stages_per_process=2: must be 1 with 1F1B",
        ),
        (axes(pp=3), "pp_size=3: must divide the number of processes, which is 4"),
        (axes(ep=3), "ep_size=3: must divide the number of processes, which is 4"),
        (
            axes(ep=4, dp_shard=2, dp_replicate=2),
            "ep_size=4: must divide the processes of a replica, which are 2",
        ),
        (
            axes(ep=4, cp=2),
            "ep_size=4: must divide the number of processes with different samples, which is 2",
        ),
        ({**axes(ep=2), "use_deepspeed": True}, "ep_size=2: is not built together with DeepSpeed"),
    ],
)
def test_axes_that_are_not_combined_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(FOUR, **flags)
