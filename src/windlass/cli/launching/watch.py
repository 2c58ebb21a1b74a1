"""The processes of this machine: which run, how the others ended, and which make no progress."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.cli.launching.failure_report import Incident, Kind, RankFacts
from windlass.core.errors import EXIT_PREEMPTED
from windlass.dist.beacon import LEFT, MEETING, STACKS_SIGNAL, Lookout, Mark

# How long the stacks of all ranks may take to arrive: a share of the ten seconds in which a job is stopped.
_STACKS_SECONDS = 2.0
# How long the slowest rank may take to join the process group after the fastest has ended.
_JOINING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Watched:
    """One process: its global rank, its id, how to poll its exit code, the file of its exception, and its marks."""

    rank: int
    pid: int
    poll: Callable[[], int | None]
    error_file: str
    lookout: Lookout


class Watch:
    """The processes of one attempt on one machine."""

    def __init__(self, machine: int, processes: list[Watched]) -> None:
        self._machine = machine
        self._processes = processes
        self._seen: dict[int, tuple[int, float]] = {}
        self._alone_since: float | None = None

    def codes(self) -> list[int | None]:
        """Return the exit code of each process; None if it runs."""
        return [process.poll() for process in self._processes]

    def _marks(self) -> Iterator[Mark]:
        return (mark for process in self._processes if (mark := process.lookout.mark()) is not None)

    def preempted(self) -> bool:
        """Return True if processes ended because a scheduler asked the job to, and none for another reason."""
        codes = self.codes()
        return EXIT_PREEMPTED in codes and all(code in (None, 0, EXIT_PREEMPTED) for code in codes)

    def preempted_at(self) -> int | None:
        """Return the step at which processes saved and exited on request; None if none recorded it."""
        return next((mark.step for mark in self._marks() if mark.call == LEFT), None)

    def failed(self) -> bool:
        """Return True if a process ended with a code other than 0."""
        return any(code not in (None, 0) for code in self.codes())

    def ended_early(self) -> bool:
        """Return True if a process ended with 0 and never joined a process group."""
        marks = [process.lookout.mark() for process in self._processes if process.poll() == 0]
        return any(mark is not None and mark.never_joined for mark in marks)

    def deserted(self, now: float, elsewhere: bool = False) -> bool:
        """Return True if a process waits for all ranks to join the process group, and one ended without joining.

        A process that ended without its last mark may have joined: then the others must wait for a while first.
        `elsewhere`: a process of another machine ended without joining.
        """
        marks = [
            (process, mark) for process in self._processes if (mark := process.lookout.mark()) is not None
        ]
        done = any(process.poll() == 0 for process, _ in marks)
        waiting = any(process.poll() is None and mark.call == MEETING for process, mark in marks)
        if not (done or elsewhere) or not waiting:
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        return elsewhere or self.ended_early() or now - self._alone_since > _JOINING_SECONDS

    def stalled(self, limit: float, now: float) -> bool:
        """Return True if a running process has written no mark for `limit` seconds.

        False as long as no process has reported anything, since the script may be one that writes no marks, and while
        one waits for all ranks to join the process group, which has a limit of its own.
        """
        idle = self._idle(now)
        marks = list(self._marks())
        if all(mark.is_opening for mark in marks) or any(mark.call == MEETING for mark in marks):
            return False
        return any(idle[p.rank] >= limit for p in self._processes if p.poll() is None)

    def incident(self, kind: Kind) -> Incident:
        """Return the state of every process now, with the stacks of those that run."""
        self._ask_for_stacks()
        idle = self._idle(time.monotonic())
        # Subtracted from the wall clock once, so that ranks are ordered by the monotonic clock that they share.
        boot = time.time() - time.monotonic()
        return Incident(kind, [self._facts(process, idle[process.rank], boot) for process in self._processes])

    def _idle(self, now: float) -> dict[int, float]:
        """Return the seconds since the mark of each rank last changed, as far as this watch has seen it."""
        for process in self._processes:
            mark = process.lookout.mark()
            count = mark.count if mark else 0
            if self._seen.get(process.rank, (None, 0.0))[0] != count:
                self._seen[process.rank] = (count, now)
        return {process.rank: now - self._seen[process.rank][1] for process in self._processes}

    def _ask_for_stacks(self) -> None:
        running = [process for process in self._processes if process.poll() is None]
        # Only a process that wrote a mark is known to handle the signal; it would end any other.
        asked = [process for process in running if process.lookout.mark() is not None]
        for process in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, STACKS_SIGNAL)
        deadline = time.monotonic() + _STACKS_SECONDS
        sizes: list[int] = []
        while time.monotonic() < deadline:
            before, sizes = sizes, [len(process.lookout.stacks()) for process in asked]
            if all(sizes) and sizes == before:
                return
            time.sleep(0.05)

    def _facts(self, process: Watched, idle: float, boot: float) -> RankFacts:
        code = process.poll()
        mark = process.lookout.mark() or Mark(0, None, "")
        error = _read_error(process.error_file) if code != 0 else {}
        extra = error.get("extraInfo") or {}
        running = code is None and not error
        stacks = process.lookout.stacks() if running else ""
        return RankFacts(
            rank=process.rank,
            machine=self._machine,
            # A process that has recorded its exception is about to exit: what its threads do now is irrelevant.
            ending="done" if code == 0 else "running" if running else "failed",
            exit_code=code,
            mark=replace(mark, step=extra.get("step", mark.step), call=extra.get("call") or mark.call),
            message=error.get("message", ""),
            traceback=extra.get("py_callstack", ""),
            time=boot + extra["monotonic"] if "monotonic" in extra else float(extra.get("timestamp") or 0),
            stacks=stacks,
            idle=idle,
            silent=running and mark.count > 0 and not stacks,
            axes=process.lookout.place(),
        )


def _read_error(error_file: str) -> dict[str, Any]:
    """Return the exception that a process recorded; empty if it recorded none, or not all of it."""
    try:
        message = json.loads(Path(error_file).read_text("utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return message if isinstance(message, dict) else {"message": str(message)}
