"""How each strategy distributes a model, as data: FSDP2, ZeRO, a pipeline. `DistPlan` of `plan.py` has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Fully sharded data parallelism (FSDP2).

    Attributes:
        reshard: True frees gathered parameters after each forward (full_shard), False keeps them until the backward
            (shard_grad_op), an integer reshards to that many ranks.
        replicas: replicas of the model over all ranks; above 1 it is hybrid sharding, with `world / replicas` ranks per
            replica. `replicas == world` shards nothing (no_shard).
        wrap: which submodules are gathered separately: those of `layers` (class names; by default the model's
            `_no_split_modules`), those of at least `min_parameters`, or only the whole model.
        cpu_offload: parameters, gradients and optimizer state stay in host memory between uses.
        param_dtype, reduce_dtype, output_dtype: None keeps that of the parameters.
        forward_prefetch, backward_prefetch: how many layers ahead are gathered explicitly; 0 leaves it to PyTorch.
        recompute: recompute the activations of each layer in the backward.
        recompute_offload: keep the inputs of recomputed layers in host memory.
        state: format in checkpoints: one file of whole tensors, or the shards of each rank.
        ram_efficient: only the first rank of each machine loads the weights into host memory; the others start from the
            meta device.
        ignored: regular expression or names of modules that are not sharded.
    """

    reshard: bool | int = True
    replicas: int = 1
    wrap: Literal["none", "transformer", "size"] = "none"
    layers: tuple[str, ...] = ()
    min_parameters: int = 100_000_000
    cpu_offload: bool = False
    param_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    output_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    recompute: bool = False
    recompute_offload: bool = False
    state: Literal["full", "sharded"] = "sharded"
    ram_efficient: bool = False
    ignored: str | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ZeroPlan:
    """DeepSpeed's ZeRO: each rank has a part of the optimizer state (stage 1), the gradients (2), the parameters (3).

    Attributes:
        config: of DeepSpeed's engine; in a loop of the user's own, as it was given, with "auto" and the sections of
            the optimizer and the schedule.
        origin: where it was given, for messages.
        max_norm: the global norm to which a loop clips that does not do so itself; None does not clip.
        any_optimizer: an optimizer may be used of which it is not known if its update of an element depends on that
            element alone.
        divides_new: models of transformers are divided while they are built.
    """

    config: dict[str, Any]
    origin: str = "deepspeed"
    divides_new: bool = False
    max_norm: float | None = None
    any_optimizer: bool = False


Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# Schedules whose ranks have several stages each.
_SEVERAL = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How the layers of a model are divided among ranks."""

    size: int  # the ranks of a pipeline
    # The order of forwards and backwards, by its name in `torch.distributed.pipelining`
    schedule: Schedule = "1F1B"
    stages_per_rank: int = 1  # stages that each rank computes
    # Names of the modules with which all stages but the first begin; empty: as even as possible
    split_points: tuple[str, ...] = ()

    @property
    def placement(self) -> list[int]:
        """For each stage the rank that computes it: in turn, or there and back (a V) for a schedule that needs it."""
        there = list(range(self.size))
        return there + there[::-1] if self.schedule == "ZBVZeroBubble" else there * self.stages_per_rank


def usual_stages(schedule: str) -> int:
    """The stages of each rank unless they are set."""
    return 2 if schedule in _SEVERAL else 1


def unfit_stages(schedule: str, stages: int) -> str:
    """Why a rank cannot have so many stages; empty if it can."""
    if schedule not in _SEVERAL:
        return f"must be 1 with {schedule}: set pp_schedule to {', '.join(_SEVERAL[:2])} for more" * (
            stages != 1
        )
    if schedule == "ZBVZeroBubble":
        return "must be 2 with ZBVZeroBubble, whose stages go there and back" * (stages != 2)
    return f"must be at least 2 with {schedule}: set pp_schedule=1F1B for one" * (stages < 2)
