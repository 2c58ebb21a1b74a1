"""The marks of the other ranks of a job, and which of them keeps the rest waiting."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.dist.beacon import FOLDER_VARIABLE, Lookout, Mark

# Shares of the time after which a wait is reported: how often a rank publishes its mark in the store of the process
# group, and how long it may leave no sign of life, which its watching thread gives every few seconds.
_PUBLISH = 1 / 6
_FROZEN = 1 / 4


class OtherRanks:
    """The other ranks: of this machine in the folder of the launcher, the rest through the process group's store.

    Args:
        report_after: seconds after which a wait is reported.
    """

    def __init__(self, environ: Mapping[str, str], report_after: float) -> None:
        self._report_after = report_after
        self._rank, self._world = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        folder = environ.get(FOLDER_VARIABLE)
        first = self._rank - int(environ.get("LOCAL_RANK", 0))
        here = range(first, first + int(environ.get("LOCAL_WORLD_SIZE", 1))) if folder else range(0)
        self._lookouts = {rank: Lookout(Path(folder or ""), rank) for rank in here if rank != self._rank}
        self._marks: dict[int, Mark] = {}
        # Seconds since the sign of life of each rank changed, as far as this process has looked.
        self._silent: dict[int, float] = {}
        self._board: _Board | None = None

    @property
    def own_name(self) -> str:
        return f"rank {self._rank} of {self._world}" if self._world > 1 else "this process"

    def publish(self, mark: Mark) -> None:
        """Let ranks that cannot read the folder know the mark of this one."""
        if self._world > len(self._lookouts) + 1 and self._board is None:
            store = _store()
            if store is not None:
                self._board = _Board(store, self._rank, self._world, self._report_after * _PUBLISH)
        if self._board is not None:
            self._board.own = mark

    def look(self, elapsed: float) -> None:
        """Read the marks, `elapsed` seconds after the last look."""
        found = {} if self._board is None else self._board.others()
        found |= {rank: mark for rank, lookout in self._lookouts.items() if (mark := lookout.mark())}
        for rank, mark in found.items():
            before = self._marks.get(rank)
            alive = before is None or before != mark
            self._silent[rank] = 0.0 if alive else self._silent[rank] + elapsed
        self._marks |= found

    def end(self) -> None:
        """Wait for the last call of the store; `publish` makes none afterwards."""
        if self._board is not None:
            self._board.end()

    def missing(self, own: Mark) -> str:
        """The ranks that are behind the others, with their places; empty if none is."""
        if self._world == 1:
            return ""
        unknown = [rank for rank in range(self._world) if rank != self._rank and rank not in self._marks]
        marks = {**self._marks, self._rank: own}
        lag = {rank: (not self._is_frozen(rank), *mark.lag) for rank, mark in marks.items()}
        least = min(lag.values())
        behind = [rank for rank in sorted(marks) if lag[rank] == least] if least < max(lag.values()) else []
        said = [f"rank {rank} {marks[rank].place}{self._life(rank)}" for rank in behind if rank != self._rank]
        if self._rank in behind:
            said.insert(0, "none: it is behind the others itself")
        if unknown:
            said.append(f"perhaps rank {', '.join(map(str, unknown))}, of which nothing is known")
        return "; ".join(said)

    def _is_frozen(self, rank: int) -> bool:
        return self._silent.get(rank, 0.0) > self._report_after * _FROZEN

    def _life(self, rank: int) -> str:
        frozen = ", which gives no sign of life (stopped, or in native code that holds the GIL)"
        return frozen if self._is_frozen(rank) else ""


# How long a process that ends waits for a call of the store, which may be gone.
_LAST_CALL_SECONDS = 5.0


class _Board:
    """The marks of all ranks in the store of the process group. A thread reads and writes: a store may not answer."""

    def __init__(self, store: Any, rank: int, world: int, interval: float) -> None:
        self._store, self._rank, self._world, self._interval = store, rank, world, interval
        self.own: Mark | None = None
        self._others: dict[int, Mark] = {}
        self._wanted = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="windlass-watch-board", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for the thread: a call that returns into an interpreter that is gone aborts the process."""
        self._ended.set()
        self._thread.join(_LAST_CALL_SECONDS)

    def others(self) -> dict[int, Mark]:
        """What was read last; reading goes on from now."""
        self._wanted = True
        return self._others

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # the store has gone with the process that held it
            while _store_is_open() and not self._ended.is_set():
                if self.own is not None:
                    self._store.set(f"windlass/mark/{self._rank}", json.dumps(self.own.to_json()))
                if self._wanted:
                    self._others = dict(self._read())
                self._ended.wait(self._interval)

    def _read(self) -> Any:
        for rank in range(self._world):
            key = f"windlass/mark/{rank}"
            if rank != self._rank and self._store.check([key]):
                yield rank, Mark.from_json(json.loads(self._store.get(key)))


def _c10d() -> Any:
    return sys.modules.get("torch.distributed.distributed_c10d")


def _store_is_open() -> bool:
    c10d = _c10d()
    return c10d is not None and bool(c10d.is_initialized())


def _store() -> Any:
    """A connection of its own to the store of the process group; None if there is no group."""
    with contextlib.suppress(Exception):  # torch built without distribution; a store that cannot be cloned
        return _c10d()._get_default_store().clone() if _store_is_open() else None
    return None
