"""The processes of a job of which only this one exists, to look at what one rank would do: nothing is exchanged.

Every other rank is taken to be like this one. Collectives on tensors go to PyTorch's fake process group, which leaves
their outputs as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.mesh import VIEWS, Mesh
from windlass.core.tensors import is_fake
from windlass.core.world import World
from windlass.dist.gang import Gang, Pending, ProcessGang, in_place_of_joined
from windlass.dist.wire import Streamed, own_stream


class _Sums(list[float]):
    def wait(self) -> list[float]:
        return self


class ImaginedGang(ProcessGang):
    """Ranks that all have the values of this one."""

    exists = False

    def open_views(self, timeout: timedelta) -> None:
        for view in VIEWS:
            mine = self.mesh.ranks(view, self.world.rank)
            if mine in self._views:
                continue
            if len(mine) == 1:
                Gang(self.world, self.mesh, mine, self._views)
            else:
                group = dist.new_group(list(mine), backend="fake")
                ImaginedGang(self.world, group, self.mesh, mine, self._views, group)

    def lay_out(self, mesh: Mesh, timeout: timedelta) -> bool:
        for gang in self._views.values():
            gang.mesh = mesh
        self.open_views(timeout)
        return True

    def sum(self, value: Tensor) -> Tensor:
        return value if is_fake(value) else value.mul_(self.size)

    def start_sum(self, values: list[float]) -> Pending:
        return _Sums(value * self.size for value in values)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def stream(self, tensors: list[Tensor]) -> Iterator[Streamed]:
        return own_stream(tensors)

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def vote(self, ok: bool) -> bool:
        return ok


@contextlib.contextmanager
def imagined_job(size: int) -> Iterator[None]:
    """Within the body this process is rank 0 of `size`, whose other ranks do not exist. The mesh is laid out by whoever
    joins the job first.
    """
    if size == 1:
        yield
        return
    # Registers the backend "fake" with PyTorch.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = World(0, size, 0, min(size, 8))
    with torch.device("cpu"):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        gang = ImaginedGang(world, dist.group.WORLD)
        gang.open_views(timedelta(seconds=1))
        with in_place_of_joined(gang):
            yield
    finally:
        dist.destroy_process_group()
