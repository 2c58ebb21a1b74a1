"""The process, device and peers of a Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from windlass.core.device import make_current
from windlass.core.world import World, world_from_environment
from windlass.dist.gang import Gang, join
from windlass.metrics.stage_memory import INIT, StageMemory


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
