"""Sums of a few numbers over ranks that are under way while this rank goes on."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from windlass.dist.beacon import waiting

# How long a process that leaves waits for sums that were begun and not waited for (seconds).
_PATIENCE, _TICK = 2.0, 0.002


class Pending(Protocol):
    """A sum under way: `wait` gives its result. One that is not needed any more may be dropped."""

    def wait(self) -> list[float]: ...


class DoneSum(list[float]):
    """The sums over a gang of one."""

    def wait(self) -> list[float]:
        return self


class _Buffer:
    """Numbers that a sum under way reads and writes; kept and used again for the life of the process.

    The thread that ends the sum drops its reference to the tensor. Were it the last but Python's, it would enter Python
    to do so, and take locks there: a data worker forked at that instant would never run (see `core.threads`). A
    view holds the tensor from the side of C++ as long as this object lives.
    """

    def __init__(self, length: int) -> None:
        self.tensor = torch.zeros(length, dtype=torch.float64)
        self.numbers = self.tensor.numpy()
        self._holder = self.tensor[:]


class SumUnderWay:
    """A sum over the ranks of a group."""

    _free: ClassVar[dict[int, list[_Buffer]]] = {}
    # Those that no caller has waited for: to drop the last reference to one under way may wait for other ranks.
    _begun: ClassVar[list[SumUnderWay]] = []

    def __init__(self, values: list[float], group: Any) -> None:
        free = self._free.setdefault(len(values), [])
        self._buffer = free.pop() if free else _Buffer(len(values))
        self._buffer.numbers[:] = values
        self._work = dist.all_reduce(self._buffer.tensor, group=group, async_op=True)
        self._sums: list[float] | None = None
        self._begun.append(self)

    @classmethod
    def all_end(cls) -> bool:
        """Return True if all sums that were begun have ended, or do so within a few seconds."""
        deadline = time.monotonic() + _PATIENCE
        while not all(begun._work.is_completed() for begun in cls._begun):
            if time.monotonic() > deadline:
                return False
            time.sleep(_TICK)
        cls._begun.clear()
        return True

    def wait(self) -> list[float]:
        if self._sums is None:
            if not self._work.is_completed():
                with waiting("sum of counts over ranks"):
                    self._work.wait()
            self._work.wait()  # gives at once, or raises what went wrong
            self._sums = self._buffer.numbers.tolist()
            self._begun.remove(self)
            self._free[len(self._sums)].append(self._buffer)
        return self._sums
