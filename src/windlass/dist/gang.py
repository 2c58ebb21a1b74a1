"""The processes of one job as one object. A single process is a gang of one: the normal case, with nothing to ask.

`Gang.over` returns those of them that have something in common, as a gang with the same interface: see `core/mesh.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.attempt import open_store_of_job, uses_launchers_store
from windlass.core.device import backend_for
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.mesh import VIEWS, Mesh, View
from windlass.core.threads import wait_for_foreign_threads
from windlass.core.world import World, check_alone, meeting_place, world_from_environment
from windlass.dist.beacon import MEETING, beacon, waiting
from windlass.dist.ending import ends_in_error, keep_groups_open, prepare_end
from windlass.dist.listening import check_gloo_devices, is_loopback, keep_gloo_on_loopback, open_store
from windlass.dist.process_groups import ProcessGroups
from windlass.dist.same_call import in_same_call
from windlass.dist.sums import DoneSum, Pending, SumUnderWay
from windlass.dist.watchdog import watch
from windlass.dist.wire import Streamed, gather, own_stream, stream


class Gang:
    """Rank, size and the small host-side exchanges of a gang of one.

    Args:
        views: gangs of this rank's views, by their members, in which this one is entered; None begins with none.

    Attributes:
        world: this process in its job and on its machine, whichever ranks of the job the gang has.
        mesh: the axes of all ranks of the job.
        members: ranks in the job of the processes in this gang, in ascending order.
        rank, size: of this process among the members, and their number.
        exists: the other members are processes; False if they are only imagined.
    """

    exists = True

    def __init__(
        self,
        world: World | None = None,
        mesh: Mesh | None = None,
        members: tuple[int, ...] | None = None,
        views: dict[tuple[int, ...], Gang] | None = None,
    ) -> None:
        self.world = world or World()
        self.mesh = mesh or Mesh(replicate=self.world.size)
        self.members = tuple(range(self.world.size)) if members is None else members
        self.rank, self.size = self.members.index(self.world.rank), len(self.members)
        # Views with the same members are one gang, and so need one process group.
        self._views = {} if views is None else views
        self._views[self.members] = self

    def over(self, view: View) -> Gang:
        """The gang of the job's ranks that have this in common with this one; `core.mesh.VIEWS` describes each view.

        "data", "loss" and "all" are one object, and "model" is a gang of one, unless the mesh has further axes than
        `replicate` and `shard`.

        Raises:
            ConfigError: there is no such view.
        """
        return self._views[self.mesh.ranks(view, self.world.rank)]

    @property
    def on_machine(self) -> range:
        """The ranks in the job of the processes on this machine."""
        first = self.world.rank - self.world.local_rank
        return range(first, first + self.world.local_size)

    def sum(self, value: Tensor) -> Tensor:
        """Sum of a host tensor over ranks, in place."""
        return value

    def start_sum(self, values: list[float]) -> Pending:
        """Begin summing a few numbers over ranks, each for itself, in double precision."""
        return DoneSum(values)

    def sum_on_device(self, value: Tensor) -> Tensor:
        """Sum over ranks of a tensor that lies where gradients lie, in place, without the host waiting for it."""
        return value

    def max_on_device(self, value: Tensor) -> Tensor:
        """The largest value of any rank, as `sum_on_device`."""
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values are what `dist/wire.py` can carry; they are never pickled.

        Raises:
            DataError: on all ranks: the value of one of them cannot be sent.
        """
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`; those of other ranks are not looked at. Raises as `gather_objects` does."""
        return value

    def stream(self, tensors: list[Tensor]) -> Iterator[Streamed]:
        """Every rank's tensors one after another, in rank order (`wire.stream`); empties `tensors` as it goes."""
        return own_stream(tensors)

    def barrier(self, call: str = "") -> None:
        """Wait until every rank is here: in the same call of the script, or in one of those that pass this name."""

    def vote(self, ok: bool) -> bool:
        """Return True if *every* rank passed True."""
        return ok

    @property
    def host_group(self) -> Any:
        """The process group whose collectives run on host memory; None in a gang of one."""
        return None

    @property
    def device_group(self) -> Any:
        """The process group whose collectives run where gradients lie; None is the default group, of all ranks."""
        return None

    def machine_group(self) -> Any:
        """A process group of the members on this machine, on the backend of the device. Collective when it is first
        asked for.
        """
        return None

    def group_of(self, parts: Iterable[Iterable[int]]) -> Any:
        """The process group of this rank's part of the job, on the backend of the device: see `ProcessGroups.of`."""
        return dist.group.WORLD

    def limit(self, group: Any) -> None:
        """Let the collectives of `group`, which others opened, wait as long as those of the job."""


class ProcessGang(Gang):
    """Several processes. Exchanges go over a gloo group on the host, so none of them waits for a device.

    Args:
        groups: of the job.
        parts: into which it is divided, of which this gang is one; None is the whole job.
    """

    def __init__(
        self,
        world: World,
        groups: ProcessGroups,
        mesh: Mesh | None = None,
        parts: list[tuple[int, ...]] | None = None,
        views: dict[tuple[int, ...], Gang] | None = None,
    ) -> None:
        parts = [tuple(range(world.size))] if parts is None else parts
        super().__init__(world, mesh, next(part for part in parts if world.rank in part), views)
        self._groups = groups
        self._device, self._host = groups.of(parts), groups.of(parts, "gloo")
        self._machine: Any = None

    def __reduce__(self) -> Any:
        # An object that holds a gang can be copied in this process, and sent to a data worker of it.
        return _seen_from_here, (self.world, self.mesh, self.members)

    def open_views(self) -> None:
        """Make the gangs of the views that are not the whole job. Collective."""
        if place := self.mesh.place(self.world.rank):
            beacon().place(place)
        for view in VIEWS:
            mine = self.mesh.ranks(view, self.world.rank)
            if mine in self._views:
                continue
            if len(mine) == 1:
                Gang(self.world, self.mesh, mine, self._views)
            else:
                type(self)(self.world, self._groups, self.mesh, self.mesh.parts(view), self._views)

    def lay_out(self, mesh: Mesh, timeout: timedelta) -> bool:
        """Use the views of `mesh`: those of before, or if the ranks have only shared out data so far, new ones. Return
        False if they have another layout. Collective.
        """
        if mesh == self.mesh or all(mesh.parts(view) == self.mesh.parts(view) for view in VIEWS):
            return True
        if self.mesh.size("model") > 1:
            return False
        for gang in self._views.values():
            gang.mesh = mesh
        self._groups.timeout = timeout
        self.open_views()
        return True

    @property
    def host_group(self) -> Any:
        return self._host

    @property
    def device_group(self) -> Any:
        return self._device

    def machine_group(self) -> Any:
        if self._machine is None:
            self._machine = self._groups.among([rank for rank in self.members if rank in self.on_machine])
        return self._machine

    def group_of(self, parts: Iterable[Iterable[int]]) -> Any:
        return self._groups.of(parts)

    def limit(self, group: Any) -> None:
        self._groups.limit(group)

    def close(self) -> None:
        """Let go of the process groups of all views; exchanges are over."""
        for gang in self._views.values():
            if isinstance(gang, ProcessGang):
                gang._host = gang._device = gang._machine = None

    def sum(self, value: Tensor) -> Tensor:
        with waiting("sum over ranks (host)"):
            dist.all_reduce(value, group=self._host)
        return value

    def start_sum(self, values: list[float]) -> Pending:
        return SumUnderWay(values, self._host)

    def sum_on_device(self, value: Tensor) -> Tensor:
        with waiting("sum over ranks (device)"):
            dist.all_reduce(value, group=self._device)
        return value

    def max_on_device(self, value: Tensor) -> Tensor:
        with waiting("largest value over ranks (device)"):
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._device)
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        with waiting("gather objects"):
            return gather(value, self._host)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.gather_objects(value if self.rank == source else None)[source]

    def stream(self, tensors: list[Tensor]) -> Iterator[Streamed]:
        return stream(tensors, self._host)

    def barrier(self, call: str = "") -> None:
        with waiting("barrier"):
            in_same_call("barrier", True, self._host, call)

    def vote(self, ok: bool) -> bool:
        with waiting("vote"):
            return in_same_call("vote", ok, self._host)


class Outside(Gang):
    """Processes of a job, seen by a data worker of one of them: rank and size, and nothing to exchange."""

    def over(self, view: View) -> Gang:
        return Outside(self.world, self.mesh, self.mesh.ranks(view, self.world.rank))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DataError(
            f"a data worker of rank {self.rank} cannot exchange values with the {self.size} processes of the job; "
            "do it in the training process, and pass the dataset what it returns"
        )

    sum = start_sum = sum_on_device = max_on_device = gather_objects = broadcast_object = _refuse
    stream = barrier = vote = machine_group = group_of = _refuse
    host_group = device_group = property(_refuse)


def _seen_from_here(world: World, mesh: Mesh, members: tuple[int, ...]) -> Gang:
    found = current()
    if (found.world, found.mesh) == (world, mesh):
        for view in VIEWS:
            if found.over(view).members == members:
                return found.over(view)
    return Outside(world, mesh, members)


_joined: ProcessGang | None = None


# Devices that train in one process only, with the reason.
_ALONE = {
    "mps": "PyTorch has no collectives on Apple's GPU",
    "xla": "one process drives all devices of PyTorch/XLA",
}


def join(
    world: World,
    device: torch.device,
    timeout_seconds: float = 1800,
    backend: str | None = None,
    init_method: str | None = None,
    mesh: Mesh | None = None,
) -> Gang:
    """Meet the other processes of the job; a world of one has no others.

    A process group that the script opened itself is used as it is.

    Args:
        world: who we are among them.
        device: where gradients lie; decides the backend unless `backend` does.
        timeout_seconds: how long a collective waits for the others, and this process for data and background saves.
        init_method: address of the meeting point, if it is not `MASTER_ADDR` and `MASTER_PORT`.
        mesh: the axes of the ranks, whose views get process groups when the job meets; by default all ranks replicate.

    Raises:
        ConfigError: there are several processes, and the device trains in one only (MPS, XLA); the mesh has another
            number of ranks than the job, or other views than the one that it met with.
    """
    global _joined
    if mesh is not None and mesh.size() != world.size:
        raise ConfigError(
            Problem("mesh", mesh, f"has {mesh.size()} ranks, and there are {world.size} processes")
        )
    if device.type in _ALONE and world.is_distributed:
        fix = f"{_ALONE[device.type]}: start one process, or use_cpu=True"
        raise ConfigError(Problem("WORLD_SIZE", world.size, fix))
    if world.is_distributed:
        prepare_end()
    watch(os.environ, timeout_seconds)
    if not world.is_distributed:
        check_alone()
        return Gang(world)
    if _joined is None or not dist.is_initialized():
        timeout = timedelta(seconds=timeout_seconds)
        check_gloo_devices()
        if not dist.is_initialized():
            if world.local_size == world.size and is_loopback(os.environ.get("MASTER_ADDR", "")):
                keep_gloo_on_loopback()
            with waiting(MEETING):
                # A meeting point of the script's own takes the place of the store.
                store = {} if init_method is not None else {"store": _store_of_meeting(world, timeout)}
                dist.init_process_group(
                    backend or backend_for(device), init_method, timeout, world.size, world.rank, **store
                )
        _joined = ProcessGang(world, ProcessGroups(timeout), mesh)
        _joined.open_views()
        atexit.register(leave)
    if mesh is not None and not _joined.lay_out(mesh, timedelta(seconds=timeout_seconds)):
        fix = f"the processes met with {_joined.mesh}, whose process groups are open; use one layout in a script"
        raise ConfigError(Problem("mesh", mesh, fix))
    return _joined


# The store in which this process met the others, by address; kept until it ends. Were it opened again, the first one at
# the next meeting could find the store of the last, which another has not left yet.
_stores: dict[tuple[str, int], Any] = {}
_meetings = itertools.count()


def _store_of_meeting(world: World, timeout: timedelta) -> Any:
    """Where the processes meet this time: apart from earlier meetings, in which they had other addresses."""
    # Here, because a torch that was built without distribution has none.
    from torch._C._distributed_c10d import PrefixStore

    where = meeting_place()
    if where not in _stores:
        _stores[where] = _open_store(world, timeout, *where)
    store = PrefixStore(f"meeting-{next(_meetings)}", _stores[where])
    store.set_timeout(timeout)
    return store


def _open_store(world: World, timeout: timedelta, address: str, port: int) -> Any:
    """The store of this attempt of the job."""
    if not uses_launchers_store() and world.is_main and is_loopback(address) and port:
        # An error: this process holds a store there already, which torch finds again.
        with contextlib.suppress(OSError):
            return open_store(address, port)[0]
    return open_store_of_job(world.rank, world.size, timeout=timeout)


@contextlib.contextmanager
def in_place_of_joined(gang: ProcessGang) -> Iterator[None]:
    """Within the body, `join` and `current` return `gang`, whose process group is open."""
    global _joined
    _joined = gang
    try:
        yield
    finally:
        gang.close()
        _joined = None


def current() -> Gang:
    """The processes that this one has joined; itself alone before `join` and after `leave`."""
    if not dist.is_initialized():
        return Gang()
    return _joined or join(_world_of_group(), torch.device("cpu"))


def _world_of_group() -> World:
    """Who we are in a process group that the script opened itself, with or without a launcher."""
    world = world_from_environment()
    rank, size = dist.get_rank(), dist.get_world_size()
    return world if world.size == size else World(rank, size, rank, size)


def leave() -> None:
    """Close the process group, if one is open. Also done when the process ends. After an error, in which this rank may
    have left a collective, the group stays open until then.

    While anything holds the group its threads run on, and one that is there when the interpreter shuts down aborts
    the process, after a run that went well. Replicated models hold it from within reference cycles.
    """
    global _joined
    if _joined is not None:
        _joined.close()
        _joined = None
    atexit.unregister(leave)
    shared = dist.is_initialized() and dist.get_world_size() > 1
    if shared and (ends_in_error() or not SumUnderWay.all_end()):
        keep_groups_open()
        return
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
    # A thread that frees the tensors of the last collective enters Python: one that does so while the interpreter shuts
    # down aborts the process.
    wait_for_foreign_threads()


def _forget_meshes() -> None:
    """Clear what DTensor keeps of operations: their results refer to the mesh of the first call, and an equal mesh of
    the next group would get those, whose groups are closed.
    """
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    # Of torch 2.10 and newer, which keep them in a second place too.
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
