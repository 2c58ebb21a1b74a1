"""How a pipeline is made, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# Schedules whose ranks have several stages each.
_SEVERAL = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How the layers of a model are divided among ranks.

    Attributes:
        size: the ranks of a pipeline.
        schedule: the order of forwards and backwards, by its name in `torch.distributed.pipelining`.
        stages_per_rank: stages that each rank computes.
        split_points: names of the modules with which all stages but the first begin; empty: as even as possible.
    """

    size: int
    schedule: Schedule = "1F1B"
    stages_per_rank: int = 1
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
