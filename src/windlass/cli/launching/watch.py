"""Which processes of this machine live, which have ended and how, and which stand still."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    """One process: its global rank, its id, how to ask for its exit code, the file of its exception, and its marks."""

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
        """Exit codes, None of those that run."""
        return [process.poll() for process in self._processes]

    def leaving(self) -> bool:
        """Whether processes end because a scheduler asked the job to leave, and none for another reason."""
        codes = self.codes()
        return EXIT_PREEMPTED in codes and all(code in (None, 0, EXIT_PREEMPTED) for code in codes)

    def left_at(self) -> int | None:
        """The step at which processes left in an orderly way; None where none of them said so."""
        marks = [process.lookout.mark() for process in self._processes]
        return next((mark.step for mark in marks if mark is not None and mark.call == LEFT), None)

    def failed(self) -> bool:
        """Whether a process has ended badly."""
        return any(process.poll() not in (None, 0) for process in self._processes)

    def ended_early(self) -> bool:
        """Whether a process has ended well without having joined a process group."""
        marks = [process.lookout.mark() for process in self._processes if process.poll() == 0]
        return any(mark is not None and mark.never_joined for mark in marks)

    def deserted(self, now: float, elsewhere: bool = False) -> bool:
        """Whether a process waits for all ranks to join the process group, and one has ended well without joining.

        One that did not get to say how far it was may have joined: then the others must be seen to wait for a while.

        Args:
            elsewhere: one of another machine has.
        """
        marks = {p.rank: p.lookout.mark() for p in self._processes}
        gone = [mark for p in self._processes if p.poll() == 0 and (mark := marks[p.rank])]
        left = [mark for p in self._processes if p.poll() is None and (mark := marks[p.rank])]
        if not (gone or elsewhere) or not any(mark.call == MEETING for mark in left):
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        return elsewhere or self.ended_early() or now - self._alone_since > _JOINING_SECONDS

    def stalled(self, limit: float, now: float) -> bool:
        """Whether some process that runs has left no mark for `limit` seconds.

        Nobody is watched before the first of them has said anything: the script may be one that leaves no marks. Nor
        while one waits for all ranks to join the process group, which has a limit of its own.
        """
        idle = self._idle(now)
        marks = [process.lookout.mark() for process in self._processes]
        if all(mark is None or mark.is_opening for mark in marks):
            return False
        if any(mark is not None and mark.call == MEETING for mark in marks):
            return False
        return any(idle[p.rank] >= limit for p in self._processes if p.poll() is None)

    def incident(self, kind: Kind) -> Incident:
        """What every process does right now; those that run are asked for their stacks."""
        running = [process for process in self._processes if process.poll() is None]
        self._ask_for_stacks(running)
        idle = self._idle(time.monotonic())
        return Incident(kind, [self._facts(process, idle[process.rank]) for process in self._processes])

    def _idle(self, now: float) -> dict[int, float]:
        """Seconds since the mark of each rank changed, as far as this watch has seen it."""
        for process in self._processes:
            mark = process.lookout.mark()
            count = mark.count if mark else 0
            if self._seen.get(process.rank, (None, 0.0))[0] != count:
                self._seen[process.rank] = (count, now)
        return {process.rank: now - self._seen[process.rank][1] for process in self._processes}

    def _ask_for_stacks(self, running: list[Watched]) -> None:
        # Only a process that left a mark is known to handle the signal; it would end any other.
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

    def _facts(self, process: Watched, idle: float) -> RankFacts:
        code = process.poll()
        mark = process.lookout.mark() or Mark(0, None, "")
        said = _said(process.error_file) if code != 0 else {}
        extra = said.get("extraInfo") or {}
        return RankFacts(
            rank=process.rank,
            machine=self._machine,
            # One that has written its exception is on its way out: what its threads do now tells nothing.
            ending="done" if code == 0 else "failed" if code or said else "running",
            exit_code=code,
            step=extra.get("step", mark.step),
            call=extra.get("call") or mark.call or None,
            message=said.get("message", ""),
            traceback=extra.get("py_callstack", ""),
            time=float(extra.get("time") or extra.get("timestamp") or 0),
            stacks=process.lookout.stacks() if code is None and not said else "",
            idle=idle,
            marks=mark.count,
            collectives=mark.collectives,
            silent=code is None and not said and mark.count > 0 and not process.lookout.stacks(),
        )


def _said(error_file: str) -> dict[str, Any]:
    """The exception that a process wrote before it ended; empty where it wrote none, or not all of it."""
    try:
        message = json.loads(Path(error_file).read_text("utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return message if isinstance(message, dict) else {"message": str(message)}
