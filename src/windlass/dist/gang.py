"""The processes of one job as one object. A single process is a gang of one: the normal case, with nothing to ask."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.device import backend_for
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.foreign_threads import wait_for_foreign_threads
from windlass.core.world import World, world_from_environment
from windlass.dist.beacon import MEETING, waiting
from windlass.dist.listening import ONE_ATTEMPT, is_loopback, keep_gloo_on_loopback, open_store
from windlass.dist.watchdog import watch
from windlass.dist.wire import Streamed, gather, own_stream, stream


class Pending(Protocol):
    """A sum under way: `wait` gives its result."""

    def wait(self) -> list[float]: ...


class _Done:
    def __init__(self, values: list[float]) -> None:
        self._values = values

    def wait(self) -> list[float]:
        return self._values


class _Buffer:
    """Numbers that a sum under way reads and writes; kept and used again for the life of the process.

    The thread that ends the sum drops its reference to the tensor. Were it the last but Python's, it would enter Python
    to do so, and take locks there: a data worker forked at that instant would never run (see `core.foreign_threads`). A
    view holds the tensor from the side of C++ as long as this object lives.
    """

    def __init__(self, length: int) -> None:
        self.tensor = torch.zeros(length, dtype=torch.float64)
        self.numbers = self.tensor.numpy()
        self._holder = self.tensor[:]


class _InFlight:
    _free: ClassVar[dict[int, list[_Buffer]]] = {}

    def __init__(self, values: list[float], group: Any) -> None:
        free = self._free.setdefault(len(values), [])
        self._buffer = free.pop() if free else _Buffer(len(values))
        self._buffer.numbers[:] = values
        self._work = dist.all_reduce(self._buffer.tensor, group=group, async_op=True)
        self._sums: list[float] | None = None

    def wait(self) -> list[float]:
        if self._sums is None:
            if not self._work.is_completed():
                with waiting("sum of counts over ranks"):
                    self._work.wait()
            self._work.wait()  # gives at once, or raises what went wrong
            self._sums = self._buffer.numbers.tolist()
            self._free[len(self._sums)].append(self._buffer)
        return self._sums


class Gang:
    """Rank, size and the small host-side exchanges of a world of one."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def sum(self, value: Tensor) -> Tensor:
        """Sum of a host tensor over ranks, in place."""
        return value

    def start_sum(self, values: list[float]) -> Pending:
        """Begin summing a few numbers over ranks, each for itself, in double precision."""
        return _Done(values)

    def sum_on_device(self, value: Tensor) -> Tensor:
        """Sum over ranks of a tensor that lies where gradients lie, in place, without the host waiting for it."""
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

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def vote(self, ok: bool) -> bool:
        """Return True if *every* rank passed True."""
        return ok

    @property
    def host_group(self) -> Any:
        """The process group whose collectives run on host memory; None in a world of one."""
        return None


class ProcessGang(Gang):
    """Several processes. Exchanges go over a gloo group on the host, so none of them waits for a device."""

    def __init__(self, world: World, host_group: Any) -> None:
        super().__init__(world)
        self._host = host_group

    def __reduce__(self) -> Any:
        # An object that holds a gang can be copied in this process, and sent to a data worker of it.
        return _seen_from_here, (self.world,)

    @property
    def host_group(self) -> Any:
        return self._host

    def close(self) -> None:
        """Let go of the process group; exchanges are over."""
        self._host = None

    def sum(self, value: Tensor) -> Tensor:
        with waiting("sum over ranks (host)"):
            dist.all_reduce(value, group=self._host)
        return value

    def start_sum(self, values: list[float]) -> Pending:
        return _InFlight(values, self._host)

    def sum_on_device(self, value: Tensor) -> Tensor:
        with waiting("sum over ranks (device)"):
            dist.all_reduce(value)
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        with waiting("gather objects"):
            return gather(value, self._host)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.gather_objects(value if self.rank == source else None)[source]

    def stream(self, tensors: list[Tensor]) -> Iterator[Streamed]:
        return stream(tensors, self._host)

    def barrier(self) -> None:
        with waiting("barrier"):
            dist.all_reduce(torch.zeros(1), group=self._host)

    def vote(self, ok: bool) -> bool:
        no_votes = torch.tensor([0 if ok else 1])
        with waiting("vote"):
            dist.all_reduce(no_votes, group=self._host)
        return int(no_votes) == 0


class Outside(Gang):
    """The processes of a job, seen by a data worker of one of them: rank and size, and nothing to exchange."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DataError(
            f"a data worker of rank {self.rank} cannot exchange values with the {self.size} processes of the job; "
            "do it in the training process, and pass the dataset what it returns"
        )

    sum = start_sum = sum_on_device = gather_objects = broadcast_object = stream = barrier = vote = _refuse
    host_group = property(_refuse)


def _seen_from_here(world: World) -> Gang:
    found = current()
    return found if found.world == world else Outside(world)


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
) -> Gang:
    """Meet the other processes of the job; a world of one has nobody to meet.

    A process group that the script opened itself is used as it is.

    Args:
        world: who we are among them.
        device: where gradients lie; decides the backend unless `backend` does.
        timeout_seconds: how long a collective waits for the others, and this process for data and background saves.
        init_method: address of the meeting point, if it is not `MASTER_ADDR` and `MASTER_PORT`.

    Raises:
        ConfigError: there are several processes, and the device trains in one only (MPS, XLA).
    """
    global _joined
    if device.type in _ALONE and world.is_distributed:
        fix = f"{_ALONE[device.type]}: start one process, or use_cpu=True"
        raise ConfigError(Problem("WORLD_SIZE", world.size, fix))
    watch(os.environ, timeout_seconds)
    if not world.is_distributed:
        return Gang(world)
    if _joined is None or not dist.is_initialized():
        timeout = timedelta(seconds=timeout_seconds)
        if not dist.is_initialized():
            if world.local_size == world.size and is_loopback(os.environ.get("MASTER_ADDR", "")):
                keep_gloo_on_loopback()
            with waiting(MEETING):
                # A meeting point of the script's own takes the place of the store.
                store = {} if init_method is not None else {"store": _store_of_meeting(world, timeout)}
                dist.init_process_group(
                    backend or backend_for(device), init_method, timeout, world.size, world.rank, **store
                )
        host = (
            dist.group.WORLD
            if dist.get_backend() == "gloo"
            else dist.new_group(backend="gloo", timeout=timeout)
        )
        _joined = ProcessGang(world, host)
        atexit.register(leave)
    return _joined


# The store in which this process met the others, by address; kept until it ends. Were it opened again, the first one at
# the next meeting could find the store of the last, which another has not left yet.
_stores: dict[tuple[str, str], Any] = {}
_meetings = itertools.count()


def _store_of_meeting(world: World, timeout: timedelta) -> Any:
    """Where the processes meet this time: apart from earlier meetings, in which they had other addresses."""
    # Here, because a torch that was built without distribution has none.
    from torch._C._distributed_c10d import PrefixStore

    where = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if where not in _stores:
        _stores[where] = _open_store(world, timeout, *where)
    store = PrefixStore(f"meeting-{next(_meetings)}", _stores[where])
    store.set_timeout(timeout)
    return store


def _open_store(world: World, timeout: timedelta, address: str, port: str) -> Any:
    """The store of this attempt of the job. Torch's launcher keeps one store over its restarts, and in it the addresses
    of processes that are gone; Windlass's opens a new one.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not launchers and world.is_main and is_loopback(address) and port:
        # An error: this process holds a store there already, which torch finds again.
        with contextlib.suppress(OSError):
            return open_store(address, int(port))[0]
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    # Machines may count restarts differently: all of them go by what is in the store.
    if launchers and attempt != "0" and not store.check([ONE_ATTEMPT]):
        return PrefixStore(f"attempt-{attempt}", store)
    return store


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
    """Close the process group, if one is open. Also done when the process ends.

    While anything holds the group its threads run on, and one that is there when the interpreter shuts down aborts
    the process, after a run that went well. Replicated models hold it from within reference cycles.
    """
    global _joined
    if _joined is not None:
        _joined.close()
        _joined = None
    atexit.unregister(leave)
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    # A thread that frees the tensors of the last collective enters Python: one that does so while the interpreter shuts
    # down aborts the process.
    wait_for_foreign_threads()
