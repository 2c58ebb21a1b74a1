"""The process, device and peers of a Trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windlass.assemble.resolve import resolve_mesh
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import DistPlan
from windlass.core.device import make_current
from windlass.core.world import World, world_from_environment
from windlass.dist.gang import Gang, join
from windlass.metrics.stage_memory import INIT, StageMemory


@dataclass(frozen=True, slots=True)
class Session:
    """The process, its device and memory, and the other processes, for as long as a Trainer lives."""

    world: World
    device: torch.device
    all_ranks: Gang  # every process of the job
    memory: StageMemory

    @property
    def data_ranks(self) -> Gang:
        """The processes with different samples, whose losses and counts are summed."""
        return self.all_ranks.over("data")

    @property
    def loss_ranks(self) -> Gang:
        """The processes with different targets, over which gradients are averaged."""
        return self.all_ranks.over("loss")

    def counts_figures(self, dist: DistPlan) -> bool:
        """Return True on the one process of those with the same samples that counts figures beside the loss: where the
        last stage of a pipeline runs, else on the first.
        """
        if dist.pipeline is None:
            return self.all_ranks.over("model").rank == 0
        last = self.all_ranks.over("pipeline").rank == dist.pipeline.placement[-1]
        return last and self.all_ranks.over("tensor").rank == self.all_ranks.over("context").rank == 0

    @classmethod
    def open(cls, args: TrainingArguments) -> Session:
        """Choose this process's device and join the other processes. Collective."""
        world, device = world_from_environment(), args.device
        make_current(device)
        memory = StageMemory(device)
        if not args.skip_memory_metrics:
            memory.begin(INIT)
        mesh = resolve_mesh(args, world)
        return cls(world, device, join(world, device, args.ddp_timeout, args.ddp_backend, mesh=mesh), memory)
