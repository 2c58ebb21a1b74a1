"""What each process of a job was doing when it failed or stood still, and the text that says so."""

from __future__ import annotations

import re
import signal
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from windlass.core import output
from windlass.core.errors import EXIT_PREEMPTED
from windlass.dist.beacon import END_ALONE, EXCHANGES, Mark

# What a rank says when it has lost the others: it is a consequence of their failing, never its cause.
_LOST_PEERS = re.compile(
    r"connection (reset|closed|refused)|closed by peer|broken pipe|remote process|socket closed|"
    r"recvvalue failed|failed to recv|timed out waiting|wait timeout|store.*(closed|timeout)|"
    r"ncclRemoteError|collective operation timeout",
    re.IGNORECASE,
)
# Of those, what it says when it has waited as long as a collective may.
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_STARTING_FRAME = re.compile(r'File "(<frozen runpy>|[^"]*windlass/cli/launching/worker\.py)"')
# The most that one line of the list of ranks quotes of a message.
_LINE = 160
Ending = Literal["running", "done", "failed"]
# "deserted": a rank ended well before it joined the process group, and others wait for it. "lost": another machine
# gives no sign any more. "abandoned": nothing was wrong on this machine, and another reported a failure.
Kind = Literal["failed", "stalled", "deserted", "lost", "abandoned"]
# Of the kinds that machines report of one incident, the first tells most.
_BY_WEIGHT: tuple[Kind, ...] = ("stalled", "failed", "deserted", "lost", "abandoned")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One process, as it was found.

    Attributes:
        rank, machine: global rank and rank of its machine.
        ending: "running" when it was alive and was stopped, "done" when it had ended well, "failed" otherwise.
        exit_code: negative for the signal that killed it, as `subprocess` has it; None while running.
        step, call: its last mark; None where it left none.
        message, traceback: the exception it ended with, empty where there was none to read.
        time: seconds since the epoch at which the exception was raised; 0 where not known.
        stacks: the stacks of its threads, empty where it could not be asked.
        idle: seconds without a mark; 0 where this was not watched.
        marks: how many it has left; 0 where this was not watched.
        collectives: how many it has issued on the process group of all ranks; -1 where not known.
        silent: it was alive and did not write its stacks when asked, as a process does that is stopped.
    """

    rank: int
    machine: int
    ending: Ending
    exit_code: int | None = None
    step: int | None = None
    call: str | None = None
    message: str = ""
    traceback: str = ""
    time: float = 0.0
    stacks: str = ""
    idle: float = 0.0
    marks: int = 0
    collectives: int = -1
    silent: bool = False

    @property
    def gave_up_waiting(self) -> bool:
        """Whether it failed because another rank did not come within the timeout."""
        return self.lost_its_peers and _TIMED_OUT.search(self.message) is not None

    @property
    def lost_its_peers(self) -> bool:
        """Whether it failed only because another rank had gone."""
        return bool(self.message) and _LOST_PEERS.search(self.message) is not None

    @property
    def left(self) -> bool:
        """Whether it ended because a scheduler asked the job to leave."""
        return self.exit_code == EXIT_PREEMPTED and not self.message

    @property
    def never_joined(self) -> bool:
        """Whether it ended well without having joined a process group."""
        return self.call == END_ALONE

    @property
    def waits(self) -> bool:
        """Whether it was in an exchange, where a rank stands still because another one does not come."""
        return self.call is not None and self.call.startswith(EXCHANGES)


@dataclass(frozen=True, slots=True)
class LostMachine:
    """A machine whose launcher gave no sign for `seconds`."""

    machine: int
    name: str
    seconds: float

    def __str__(self) -> str:
        return f"machine {self.machine}{f' ({self.name})' if self.name else ''}"


@dataclass(slots=True)
class Incident:
    """One attempt that did not end well: all ranks that are known of, and the machines that gave no sign any more."""

    kind: Kind
    ranks: list[RankFacts] = field(default_factory=list)
    lost: list[LostMachine] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        # Machines are lost to the one that looks: others see for themselves.
        return {"kind": self.kind, "ranks": [asdict(rank) for rank in self.ranks]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Incident:
        return cls(content["kind"], [RankFacts(**rank) for rank in content["ranks"]])

    def joined_with(self, other: Incident) -> Incident:
        """The same incident with the ranks of another machine. One that stopped for the sake of others knows less."""
        kind = min(self.kind, other.kind, key=_BY_WEIGHT.index)
        return Incident(kind, [*self.ranks, *other.ranks], self.lost)

    @property
    def culprit(self) -> RankFacts | None:
        """The rank to look at first.

        Of ranks that failed, the first that did not merely lose its peers; a process that was killed said nothing and
        comes before those that did. Where all lost their peers it is one that had ended early, or the one that did not
        come while they waited. Of ranks that stand still, one that does not answer, else the one with the oldest step
        that is not waiting in an exchange with the others; where all of them wait, again one that had ended, else the
        one that has issued fewer collectives. One that left because it was asked to is a cause for nobody.
        """
        gone = [rank for rank in self.ranks if rank.ending == "done"]
        if self.kind == "stalled":
            alive = [rank for rank in self.ranks if rank.ending != "done"]
            waiting = bool(gone) and all(rank.waits for rank in alive)
            return min(gone if waiting else alive, key=_lag, default=None)
        if self.kind == "deserted":
            return min(gone, key=lambda rank: (not rank.never_joined, rank.rank), default=None)
        failed = [rank for rank in self.ranks if rank.ending == "failed"]
        causes = [rank for rank in failed if not rank.lost_its_peers and not rank.left]
        if causes:
            return min(causes, key=lambda rank: (rank.time, rank.rank))
        if not gone and any(rank.gave_up_waiting for rank in failed):
            late = [rank for rank in self.ranks if rank.ending == "running"]
            return min(late or failed, key=_lag)
        return min(gone or failed, key=lambda rank: (rank.time, rank.rank), default=None)

    @property
    def is_of_lost_machine(self) -> bool:
        """Whether a machine that gives no sign explains what happened: the ranks here only wait or lost their peers."""
        culprit = self.culprit
        known = culprit is not None and culprit.ending == "failed" and not culprit.lost_its_peers
        return bool(self.lost) and (self.kind == "lost" or (self.kind == "failed" and not known))

    @property
    def knows_its_cause(self) -> bool:
        """Whether the culprit is among these ranks for certain: others cannot have failed before it."""
        culprit = self.culprit
        certain = culprit is not None and culprit.ending == "failed" and not culprit.lost_its_peers
        return self.kind == "failed" and certain


def _lag(rank: RankFacts) -> tuple[bool, int, bool, int, float, int, int]:
    # Marks are looked at now and then, so that two ranks may seem to stand equally long: the one with fewer is behind.
    step, waits, collectives = Mark(0, rank.step, rank.call or "", 0, rank.collectives).lag
    return (not rank.silent, step, waits, collectives, -rank.idle, rank.marks, rank.rank)


def exit_code(incident: Incident) -> int:
    """What the launcher ends with: the culprit's own code, 128 + signal for one that was killed, 124 for a stall.

    After an exception it is 1, Python's own, whatever happened while the process came down.
    """
    if incident.kind == "stalled":
        return EXIT_STALLED
    if incident.is_of_lost_machine:
        return EXIT_UNREACHABLE
    culprit = incident.culprit
    if culprit is None or culprit.message or not culprit.exit_code:
        return 1
    return culprit.exit_code if culprit.exit_code > 0 else 128 - culprit.exit_code


EXIT_STALLED = 124
# What sysexits.h calls "service unavailable": machines did not find each other, or one was lost.
EXIT_UNREACHABLE = 69


def describe(incident: Incident, world: int, logs: str) -> str:
    """The report of an incident: the first lines tell the cause, the rest what every rank was doing.

    Args:
        world: number of ranks of the job; those not in `incident` are on machines that have not reported.
        logs: folder where the processes' files lie.
    """
    culprit = incident.culprit
    lines = [_headline(incident, culprit)]
    if culprit is not None and culprit.traceback:
        lines += ["", f"Traceback of rank {culprit.rank}:", _indented(culprit.traceback)]
    lines += ["", "Every rank when it happened:"]
    for rank in sorted(incident.ranks, key=lambda rank: rank.rank):
        lines.append(f"  rank {rank.rank} (machine {rank.machine}): {_state(rank)}{_place(rank)}")
    missing = world - len(incident.ranks)
    if missing > 0:
        lines.append(f"  {missing} more on machines that have not reported; see what their launchers say")
    for rank in sorted(incident.ranks, key=lambda rank: rank.rank):
        if rank.stacks:
            lines += [
                "",
                f"Stacks of rank {rank.rank}, innermost call first:",
                _indented(_script_frames(rank.stacks)),
            ]
    lines += ["", f"Files of this attempt: {logs}"]
    return "\n".join(lines)


def _headline(incident: Incident, culprit: RankFacts | None) -> str:
    if incident.is_of_lost_machine:
        signs = "; ".join(f"{lost} gave no sign for {lost.seconds:.0f} s" for lost in incident.lost)
        return (
            f"the job lost a machine: {signs}. It lost power or its network, or its launcher was killed: look at its "
            "logs, and start the job again"
        )
    if culprit is None:
        return "the job was given up on another machine; its launcher says why"
    if culprit.ending == "done":
        others = ", ".join(str(rank.rank) for rank in incident.ranks if rank.ending != "done")
        if incident.kind == "deserted":
            return (
                f"rank {culprit.rank} ended with exit code 0 before it joined the process group, and rank {others} "
                "waited for it. Every rank must reach the call that joins the group (Trainer, Accelerator or "
                "init_process_group)"
            )
        then = "stood still" if incident.kind == "stalled" else "failed"
        return (
            f"rank {culprit.rank} ended while others still waited for it{_place(culprit)}; "
            f"rank {others} then {then}. Every rank must make the same collective calls"
        )
    if incident.kind == "stalled":
        return f"the job stands still: rank {culprit.rank} made no progress for {culprit.idle:.0f} s{_place(culprit)}"
    if culprit.ending == "running":
        others = ", ".join(str(rank.rank) for rank in incident.ranks if rank.gave_up_waiting)
        late = f"rank {culprit.rank} made no progress{_place(culprit)}"
        return f"the job failed: {late}; rank {others} gave up waiting for it"
    return f"the job failed: rank {culprit.rank} {_cause(culprit)}{_place(culprit)}"


def _cause(rank: RankFacts) -> str:
    if rank.message:
        return f"raised {rank.message.strip()}"
    if rank.exit_code is not None and rank.exit_code < 0:
        name = _signal_name(-rank.exit_code)
        hint = " (often the machine ran out of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    if rank.exit_code == EXIT_STALLED:
        return "waited longer than ddp_timeout allows, and ended itself with exit code 124"
    return f"ended with exit code {rank.exit_code}"


def _state(rank: RankFacts) -> str:
    if rank.silent:
        return "was running, did not write its stacks when asked (a stopped process cannot), and was ended"
    if rank.ending == "running":
        return "was running, and was stopped"
    if rank.ending == "done":
        return "had ended well"
    if rank.left:
        return "had left, as it was asked to"
    said = f"lost its peers: {rank.message.strip()}" if rank.lost_its_peers else _cause(rank)
    return textwrap.shorten(said.splitlines()[0], _LINE, placeholder=" ...")


def _place(rank: RankFacts) -> str:
    return "" if rank.call is None else f" {Mark(0, rank.step, rank.call).place}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _script_frames(stacks: str) -> str:
    """Without the calls that brought the script to run, which every stack begins with."""
    return "".join(line for line in stacks.splitlines(True) if not _STARTING_FRAME.search(line))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())


def say(text: str) -> None:
    """Print on stderr as the launcher. A console that is gone, or cannot show a letter, changes nothing of the job."""
    output.say(f"windlass launch: {text}", error=True)
