"""The process, device and peers of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from windlass.core.device import make_current
from windlass.core.errors import CheckpointError
from windlass.core.world import World, world_from_environment
from windlass.dist.gang import Gang, join
from windlass.metrics.stage_memory import INIT, StageMemory

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Session:
    """The process, its device and memory, and the other processes, for as long as a Trainer lives."""

    world: World
    device: torch.device
    gang: Gang
    memory: StageMemory

    @classmethod
    def open(cls, args: Any) -> Session:
        """Choose this process's device and join the other processes. Collective."""
        world, device = world_from_environment(), args.device
        make_current(device)
        memory = StageMemory(device)
        if not args.skip_memory_metrics:
            memory.begin(INIT)
        return cls(world, device, join(world, device, args.ddp_timeout, args.ddp_backend), memory)


def together(
    gang: Gang, work: Callable[[], _T], errors: tuple[type[Exception], ...] = (CheckpointError,)
) -> _T:
    """Return what `work` returns on this rank. Collective. Raises CheckpointError on all ranks, with the first reason,
    if `work` raises one of `errors` on one of them.
    """
    found, problem = None, None
    try:
        found = work()
    except errors as error:
        problem = str(error)
    for reason in gang.gather_objects(problem):
        if reason is not None:
            raise CheckpointError(reason)
    return cast(_T, found)
