"""What each process of a job was doing when it failed or stalled, and the report about it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from windlass.core import output
from windlass.core.errors import EXIT_PREEMPTED
from windlass.core.job_signals import signal_name
from windlass.dist.beacon import LEFT, MEETING, STACKS_SIGNAL, Lookout, Mark

# Errors of a rank whose peers have gone: a consequence of their failure, never its cause.
_LOST_PEERS = re.compile(
    r"connection (reset|closed|refused)|closed by peer|broken pipe|remote process|socket closed|"
    r"recvvalue failed|failed to recv|timed out waiting|wait timeout|store.*(closed|timeout)|"
    r"ncclRemoteError|collective operation timeout",
    re.IGNORECASE,
)
# Unless the message names a server outside the job, as that of a Hub or of a script's own download.
_ELSEWHERE = re.compile(r"https?://")
# Of those, the errors of a rank that waited for as long as a collective may take.
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_STARTING_FRAME = re.compile(r'File "(<frozen runpy>|[^"]*windlass/cli/launching/worker\.py)"')
_MAX_QUOTE = 160  # characters of a message in the list of ranks
EXIT_STALLED = 124
# "Service unavailable" in sysexits.h: machines did not find each other, or one was lost.
EXIT_UNREACHABLE = 69
_NO_MARK = Mark(0, None, "")
Ending = Literal["running", "done", "failed"]
# "deserted": a rank ended with exit code 0 before it joined the process group, and others wait for it. "lost": another
# machine is silent. "abandoned": nothing failed on this machine, and another reported a failure.
Kind = Literal["failed", "stalled", "deserted", "lost", "abandoned"]
# When machines report different kinds of one incident, the first of these counts.
_PRECEDENCE: tuple[Kind, ...] = ("stalled", "failed", "deserted", "lost", "abandoned")


def lost_peers(message: str) -> bool:
    """Return True if an error with this message was raised only because another rank had gone."""
    return _LOST_PEERS.search(message) is not None and _ELSEWHERE.search(message) is None


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The state of one process at an incident."""

    # `rank`, `machine`: global rank and rank of its machine
    rank: int
    machine: int
    # "running" when it was alive and was stopped, "done" when it ended with 0, "failed" otherwise
    ending: Ending
    # Negative for the signal that killed it, as in `subprocess`; None while running
    exit_code: int | None = None
    mark: Mark = _NO_MARK  # its last mark; with count 0 and an empty call if it wrote none
    # `message`, `traceback`: of the exception that ended it; empty if none was recorded
    message: str = ""
    traceback: str = ""
    # When the exception was raised, in seconds since the epoch; 0 if unknown. The launcher derives it from the
    # monotonic clock of the machine, so it orders the ranks of one machine even if its wall clock was changed.
    time: float = 0.0
    stacks: str = ""  # the stacks of its threads; empty if it could not be asked
    idle: float = 0.0  # seconds without a new mark
    silent: bool = False  # it was alive and did not write its stacks when asked, like a stopped process
    axes: str = ""  # its position along the axes of the job; empty if ranks only have different samples

    @property
    def lost_its_peers(self) -> bool:
        """True if it failed only because another rank had gone."""
        return lost_peers(self.message)

    @property
    def timed_out(self) -> bool:
        """True if it failed because another rank did not arrive within the timeout."""
        return self.lost_its_peers and _TIMED_OUT.search(self.message) is not None

    @property
    def was_preempted(self) -> bool:
        """True if it ended because a scheduler asked the job to."""
        return self.exit_code == EXIT_PREEMPTED and not self.message

    @property
    def is_cause(self) -> bool:
        """True if it failed by itself."""
        return self.ending == "failed" and not self.lost_its_peers and not self.was_preempted

    @property
    def lag(self) -> tuple[Any, ...]:
        """Smaller for a rank that others wait for; of two that are idle for equally long, the one with fewer marks."""
        return (not self.silent, *self.mark.lag, -self.idle, self.mark.count, self.rank)

    @property
    def place(self) -> str:
        """The last mark, and the position along the axes of the job, to be appended to a message."""
        return (f" {self.mark.place}" if self.mark.call else "") + (f" ({self.axes})" if self.axes else "")


@dataclass(frozen=True, slots=True)
class LostMachine:
    """A machine whose launcher has been silent for `seconds`."""

    machine: int
    name: str
    seconds: float

    def __str__(self) -> str:
        return f"machine {self.machine}{f' ({self.name})' if self.name else ''}"


@dataclass(slots=True)
class Incident:
    """One failed attempt: all ranks that have been reported, and the machines that are silent."""

    kind: Kind
    ranks: list[RankFacts] = field(default_factory=list)
    lost: list[LostMachine] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        # Without the lost machines: each launcher determines those itself.
        return {"kind": self.kind, "ranks": [asdict(rank) for rank in self.ranks]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Incident:
        ranks = [RankFacts(**{**rank, "mark": Mark(**rank["mark"])}) for rank in content["ranks"]]
        return cls(content["kind"], ranks)

    def joined_with(self, other: Incident) -> Incident:
        """Return this incident with the ranks of another machine added."""
        kind = min(self.kind, other.kind, key=_PRECEDENCE.index)
        return Incident(kind, [*self.ranks, *other.ranks], self.lost)

    @property
    def culprit(self) -> RankFacts | None:
        """The rank to look at first.

        - failed: the first that failed by itself; a killed process has no time and precedes those with an exception.
          If all of them lost their peers: one that had ended early, or the one that was late for their collective.
        - stalled: a rank that does not answer, else the one with the oldest step that is not waiting in a collective.
          If all of them wait: one that had ended, else the one that issued fewer collectives.
        - deserted: a rank that ended before it joined.

        A rank that was preempted is never the cause.
        """
        done = [rank for rank in self.ranks if rank.ending == "done"]
        if self.kind == "stalled":
            alive = [rank for rank in self.ranks if rank.ending != "done"]
            all_wait = bool(done) and all(rank.mark.waits for rank in alive)
            return min(done if all_wait else alive, key=lambda rank: rank.lag, default=None)
        if self.kind == "deserted":
            return min(done, key=lambda rank: (not rank.mark.never_joined, rank.rank), default=None)
        failed = [rank for rank in self.ranks if rank.ending == "failed"]
        causes = [rank for rank in failed if rank.is_cause]
        if not causes and not done and any(rank.timed_out for rank in failed):
            late = [rank for rank in self.ranks if rank.ending == "running"]
            return min(late or failed, key=lambda rank: rank.lag)
        return min(causes or done or failed, key=lambda rank: (rank.time, rank.rank), default=None)

    @property
    def knows_its_cause(self) -> bool:
        """True if the culprit is certainly among these ranks: no rank elsewhere can have failed before it."""
        culprit = self.culprit
        failed_by_itself = culprit is not None and culprit.ending == "failed" and not culprit.lost_its_peers
        return self.kind == "failed" and failed_by_itself

    @property
    def is_of_lost_machine(self) -> bool:
        """True if a silent machine explains the incident: the ranks here only wait or lost their peers."""
        return bool(self.lost) and self.kind in ("failed", "lost") and not self.knows_its_cause


def exit_code(incident: Incident) -> int:
    """Return the launcher's exit code: the culprit's own, 128 + signal if it was killed, 124 after a stall, or if ranks
    waited for others longer than a collective may take.

    After an exception it is 1, Python's own, even if the process aborted during shutdown.
    """
    if incident.kind == "stalled":
        return EXIT_STALLED
    if incident.is_of_lost_machine:
        return EXIT_UNREACHABLE
    culprit = incident.culprit
    if culprit is not None and (culprit.timed_out or culprit.ending == "running"):
        return EXIT_STALLED
    if culprit is None or culprit.message or not culprit.exit_code:
        return 1
    return culprit.exit_code if culprit.exit_code > 0 else 128 - culprit.exit_code


def describe(incident: Incident, world: int, logs: str) -> str:
    """Return the report of an incident: the cause first, then the state of every rank.

    Args:
        world: number of ranks of the job; those not in `incident` are on machines that have not reported.
        logs: folder with the files of the processes.
    """
    culprit = incident.culprit
    ranks = sorted(incident.ranks, key=lambda rank: rank.rank)
    lines = [_headline(incident, culprit)]
    if culprit is not None and culprit.traceback:
        lines += ["", f"Traceback of rank {culprit.rank}:", _indented(culprit.traceback)]
    lines += ["", "Every rank when it happened:"]
    lines += [f"  rank {rank.rank} (machine {rank.machine}): {_state(rank)}{rank.place}" for rank in ranks]
    if (missing := world - len(ranks)) > 0:
        lines.append(
            f"  {missing} more on machines that have not reported; see the output of their launchers"
        )
    # Where the cause is known, those of ranks that only waited would bury it.
    for rank in () if incident.knows_its_cause else ranks:
        if rank.stacks:
            title = f"Stacks of rank {rank.rank}, innermost call first:"
            lines += ["", title, _indented(_script_frames(rank.stacks))]
    return "\n".join([*lines, "", f"Files of this attempt: {logs}"])


def _headline(incident: Incident, culprit: RankFacts | None) -> str:
    if incident.is_of_lost_machine:
        silent = "; ".join(f"{lost} gave no sign for {lost.seconds:.0f} s" for lost in incident.lost)
        return (
            f"the job lost a machine: {silent}. It lost power or its network, or its launcher was killed: look at its "
            "logs, and start the job again"
        )
    if culprit is None:
        return "the job failed on another machine; see the output of its launcher"
    stalled = incident.kind == "stalled"
    if culprit.ending == "done":
        others = ", ".join(str(rank.rank) for rank in incident.ranks if rank.ending != "done")
        if incident.kind == "deserted":
            return (
                f"rank {culprit.rank} ended with exit code 0 before it joined the process group, and rank {others} "
                "waited for it. Every rank must reach the call that joins the group (Trainer, Accelerator or "
                "init_process_group)"
            )
        return (
            f"rank {culprit.rank} ended while others still waited for it{culprit.place}; rank {others} then "
            f"{'stalled' if stalled else 'failed'}. Every rank must make the same collective calls"
        )
    if stalled:
        return (
            f"the job stalled: rank {culprit.rank} made no progress for {culprit.idle:.0f} s{culprit.place}"
        )
    if culprit.ending == "running":
        others = ", ".join(str(rank.rank) for rank in incident.ranks if rank.timed_out)
        late = f"rank {culprit.rank} made no progress{culprit.place}"
        return f"the job failed: {late}; rank {others} timed out waiting for it"
    return f"the job failed: rank {culprit.rank} {_cause(culprit)}{culprit.place}"


def _cause(rank: RankFacts) -> str:
    if rank.message:
        return f"raised {rank.message.strip()}"
    if rank.exit_code is not None and rank.exit_code < 0:
        name = signal_name(-rank.exit_code)
        hint = " (often the machine ran out of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    if rank.exit_code == EXIT_STALLED:
        return "waited longer than ddp_timeout allows, and exited with code 124"
    return f"ended with exit code {rank.exit_code}"


def _state(rank: RankFacts) -> str:
    if rank.silent:
        return "was running, did not write its stacks when asked (a stopped process cannot), and was killed"
    if rank.ending == "running":
        return "was running, and was stopped"
    if rank.ending == "done":
        return "had ended with exit code 0"
    if rank.was_preempted:
        return "had saved and exited on request"
    cause = f"lost its peers: {rank.message.strip()}" if rank.lost_its_peers else _cause(rank)
    return textwrap.shorten(cause.splitlines()[0], _MAX_QUOTE, placeholder=" ...")


def _script_frames(stacks: str) -> str:
    """Drop the frames that start the script, which every stack has."""
    return "".join(line for line in stacks.splitlines(True) if not _STARTING_FRAME.search(line))


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip(), "  ", lambda line: True)


def say(text: str) -> None:
    output.say(f"windlass launch: {text}", error=True)


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
        # Not at once: the one that ended may have left its mark of joining unwritten, and the others be about to join.
        if self._alone_since is None:
            self._alone_since = now
        return elsewhere or self.ended_early() or now - self._alone_since > _JOINING_SECONDS

    def stalled(self, limit: float, now: float) -> bool:
        """Return True if a running process has written no mark for `limit` seconds.

        False as long as no process has reported anything, since the script may be one that writes no marks, and while
        one waits for all ranks to join the process group, which has a limit of its own.
        """
        marks = list(self._marks())
        if all(mark.is_opening for mark in marks):
            self._seen.clear()  # the time until the first report is not that of the ranks that report next
            return False
        idle = self._idle(now)
        if any(mark.call == MEETING for mark in marks):
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
            # A stack is whole once its file has not grown between two looks; only its writer knows how long it will be.
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
