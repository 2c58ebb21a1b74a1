"""The processes of a job of which only this one exists, to look at what one rank would do: nothing is exchanged.

Every other rank is taken to be like this one. Collectives on tensors go to PyTorch's fake process group, which leaves
their outputs as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.tensors import is_fake
from windlass.core.world import World
from windlass.dist.gang import Gang, ProcessGang, in_place_of_joined
from windlass.dist.process_groups import ProcessGroups
from windlass.dist.sums import Pending
from windlass.dist.variables import environment_of

MACHINE = 8
"""Processes of a machine of such a job."""


class _ImaginedGroups(ProcessGroups):
    """Groups of PyTorch's fake backend. Only those of this rank are opened."""

    def of(self, parts: Iterable[Iterable[int]], backend: str | None = None) -> Any:
        return super().of(parts)

    def _opened(self, parts: tuple[tuple[int, ...], ...], backend: str | None) -> Any:
        return self.among(list(next(part for part in parts if dist.get_rank() in part)))

    def among(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, backend="fake")


class ImaginedGang(ProcessGang):
    """Ranks that all have the values of this one."""

    exists = False

    def sum(self, value: Tensor) -> Tensor:
        return value if is_fake(value) else value.mul_(self.size)

    def start_sum(self, values: list[float]) -> Pending:
        return Gang.start_sum(self, [value * self.size for value in values])

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    # There is no process to wait for.
    broadcast_object, stream, barrier, vote = Gang.broadcast_object, Gang.stream, Gang.barrier, Gang.vote


@contextlib.contextmanager
def imagined_job(size: int, rank: int = 0) -> Iterator[None]:
    """Within the body this process is a rank of `size`, whose other ranks do not exist. The
    first `join` lays out the mesh.
    """
    world = World(rank, size, rank % MACHINE, min(size, MACHINE))
    variables = world.variables()
    with environment_of(**(variables if size > 1 else dict.fromkeys(variables))):
        if size == 1:
            yield
        else:
            with _imagined(world):
                yield


@contextlib.contextmanager
def _imagined(world: World) -> Iterator[None]:
    # They register the backend "fake", and what collectives return for tensors without memory.
    from torch.distributed._tools import fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with torch.device("cpu"):
        dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        gang = ImaginedGang(world, _ImaginedGroups(timedelta(seconds=1)))
        gang.open_views()
        with in_place_of_joined(gang):
            yield
    finally:
        dist.destroy_process_group()
