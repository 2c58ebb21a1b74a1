"""A thread of each process that reports what the process waits for when it makes no progress for a minute.

It wakes every few seconds and compares the beacon's marks: a step costs nothing more. The report names the call, the
stacks of this process, and the ranks that the others wait for, as far as their marks can be read: in the folder of the
launcher, or in the store of the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.core.threads import python_threads
from windlass.dist.beacon import AFTER, FOLDER_VARIABLE, MEETING, START, WAITS, Beacon, Lookout, Mark, beacon

logger = get_logger(__name__)

# Seconds without a mark after which a wait is reported.
REPORT_VARIABLE = "WINDLASS_REPORT_WAITS_AFTER"
_REPORT_SECONDS = 60.0
# The exit code of a process that waited longer than it may.
EXIT_STALLED = 124
_LOOK_SECONDS = 2.0
# How long a process that ends waits for the last look, which may wait for a store that is gone.
_LAST_LOOK_SECONDS = 5.0


class Watchdog:
    """Looks at the marks of this process.

    Args:
        report_after: seconds without a mark after which a wait is reported, once.
        limit: seconds that the process may wait for data or for a background save; then it ends with 124.
    """

    def __init__(self, marks: Beacon, others: OtherRanks, report_after: float, limit: float) -> None:
        self.limit = limit
        self._beacon, self._others, self._report_after = marks, others, report_after
        self._count, self._idle, self._reported = -1, 0.0, False
        self._marked_meeting = False
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until `end` is called."""
        interval, before = min(_LOOK_SECONDS, self._report_after / 4), time.monotonic()
        while not self._ended.wait(interval):
            now = time.monotonic()
            # A process that was stopped and goes on was not waiting in between.
            self.look(min(now - before, 2 * interval))
            before = now

    def end(self, thread: threading.Thread) -> None:
        """Called when the interpreter shuts down: wait for the thread that looks, then for those that it started.

        It may be in a call of the store, which returns into an interpreter that is gone: that aborts the process.
        """
        self._ended.set()
        thread.join(_LAST_LOOK_SECONDS)
        self._others.end()

    def look(self, elapsed: float) -> None:
        """Compare the marks with those of `elapsed` seconds ago."""
        self._mark_meeting()
        self._beacon.sign(collectives_issued())
        mark = self._beacon.mark()
        self._others.publish(mark)
        if mark.count != self._count:
            self._count, self._idle, self._reported = mark.count, 0.0, False
            return
        self._idle += elapsed
        is_limited = bool(self._beacon.limited)
        if not (is_limited or mark.call.startswith(WAITS)):
            return
        if self._idle >= self._report_after / 2:
            self._others.look(elapsed)
        if self._idle >= self._report_after and not self._reported:
            self._reported = True
            logger.warning("%s", self.report(mark))
        if self._idle >= self.limit and is_limited:
            self._end(mark)

    def report(self, mark: Mark) -> str:
        """What this process waits for."""
        text = f"{self._others.own_name} has made no progress for {self._idle:.0f} s {mark.place}"
        missing = self._others.missing(mark)
        if missing:
            text += f"; it waits for {missing}"
        return f"{text}\n{stacks()}"

    def _end(self, mark: Mark) -> None:
        logger.error(
            "%s\nthe process ends with exit code %d: it has waited longer than ddp_timeout=%g s allows",
            self.report(mark),
            EXIT_STALLED,
            self.limit,
        )
        sys.stderr.flush()
        if not hasattr(sys, "ps1") and "ipykernel" not in sys.modules:  # a notebook keeps its other work
            os._exit(EXIT_STALLED)

    def _mark_meeting(self) -> None:
        """Mark the wait of a script that opens the process group itself and leaves no marks."""
        call = self._beacon.mark().call
        if call == START and _is_meeting():
            self._marked_meeting, self._idle = True, 0.0
            self._beacon.note(MEETING)
        elif call == MEETING and self._marked_meeting and not _is_meeting():
            self._marked_meeting = False
            self._beacon.note(f"{AFTER}{MEETING}")


_watched: tuple[int, Watchdog] | None = None


def watch(environ: Mapping[str, str], limit: float | None = None) -> None:
    """Watch this process from now on, and set the limit of its waits to `limit` seconds."""
    global _watched
    if _watched is None or _watched[0] != os.getpid():  # threads are not inherited by a fork
        after = _report_seconds(environ)
        dog = Watchdog(beacon(), OtherRanks(environ, after), after, limit or float("inf"))
        _watched = (os.getpid(), dog)
        thread = threading.Thread(target=dog.run, name="windlass-watchdog", daemon=True)
        thread.start()
        atexit.register(dog.end, thread)
    elif limit is not None:
        _watched[1].limit = limit


def _report_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get(REPORT_VARIABLE) or str(_REPORT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(Problem(REPORT_VARIABLE, text, "must be a number of seconds above 0"))
    return seconds


def collectives_issued() -> int:
    """How many collectives this process has issued on the process group of all ranks; -1 if there is none.

    Of ranks that all wait in a collective, the one that has issued fewer is the one that the others wait for.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return int(c10d.group.WORLD._get_sequence_number_for_group()) if c10d.is_initialized() else -1
    except (AttributeError, RuntimeError):  # no torch, or a backend that does not count
        return -1


def _is_meeting() -> bool:
    """Whether the main thread is in a call of torch's `init_process_group`."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "init_process_group" and code.co_filename.endswith("distributed_c10d.py"):
            return True
        frame = frame.f_back
    return False


def stacks() -> str:
    """The stacks of all threads of this process but the watching one, the main thread first."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = [main, *(t for t in python_threads() if t not in (main, threading.current_thread()))]
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and not thread.name.startswith("windlass-watch"):
            parts.append(
                f"Thread {thread.name}, innermost call last:\n{''.join(traceback.format_stack(frame))}"
            )
    return "".join(parts).rstrip()


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
        store = _default_store()
        if self._board is not None and self._board.origin is not store:
            # The group was closed: its marks are of earlier work, and those of the next one are in another store.
            self._board.end()
            self._board, self._marks, self._silent = None, {}, {}
        if self._world > len(self._lookouts) + 1 and self._board is None and store is not None:
            with contextlib.suppress(Exception):  # a store that cannot be cloned
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
    """The marks of all ranks in the store of the process group. A thread reads and writes: a store may not answer.

    Attributes:
        origin: the store, to which the thread has a connection of its own.
    """

    def __init__(self, origin: Any, rank: int, world: int, interval: float) -> None:
        self.origin, self._store = origin, origin.clone()
        self._rank, self._world, self._interval = rank, world, interval
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
            while _default_store() is self.origin and not self._ended.is_set():
                if self.own is not None:
                    self._store.set(f"windlass/mark/{self._rank}", json.dumps(astuple(self.own)))
                if self._wanted:
                    self._others = dict(self._read())
                self._ended.wait(self._interval)

    def _read(self) -> Any:
        for rank in range(self._world):
            key = f"windlass/mark/{rank}"
            if rank != self._rank and self._store.check([key]):
                yield rank, Mark(*json.loads(self._store.get(key)))


def _default_store() -> Any:
    """The store of the process group; None if there is no group."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):  # torch built without distribution; a group that is closed meanwhile
        return c10d._get_default_store() if c10d is not None and c10d.is_initialized() else None
    return None
