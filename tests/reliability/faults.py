"""What happens to an attempt: where it is killed or preempted, or how its disk behaves."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass import TrainerCallback
from windlass.checkpoint.files import Files
from windlass.checkpoint.remote import RemoteFolder

# The operations of `Files`, by what they are for.
WRITES = frozenset({"ensure_folder", "make_folder", "create", "write", "fsync"})
RENAMES = frozenset({"rename", "fsync_folder"})
REMOVALS = frozenset({"remove", "remove_folder"})
OPERATIONS = {"write": WRITES, "rename": RENAMES, "removal": REMOVALS, "any": WRITES | RENAMES | REMOVALS}
_COUNTED = {"full disk": "write"}  # faults that do not affect every operation
EVENTS = {
    "between updates": ("on_step_end",),
    "in an update": ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    "in evaluation": ("on_prediction_step",),
    "at an epoch's edge": ("on_epoch_end", "on_epoch_begin"),
}
UPLOADING = "while uploading"  # for runs with a remote folder
KILLS = {
    **dict.fromkeys(EVENTS, ""),
    "while a file is written": "write",
    "around a rename": "rename",
    "in retention": "removal",
    "at a random instant": "",
    UPLOADING: "upload",
    "at a file operation": "any",
}
INTERRUPTED, WORKER_KILLED = INTERRUPTS = ("interrupted twice", "a data worker is killed")
BY_CLOCK = ("at a random instant", *INTERRUPTS)
_LONGEST_GAP = 0.1  # seconds between the first and the second Ctrl-C
LEAVE, KILLED_LEAVING = LEAVES = ("preempted", "preempted, then killed")
_EVERY_EVENT = tuple(name for names in EVENTS.values() for name in names)
_LONGEST_NOTICE = 0.05  # seconds between being preempted and being killed; a save takes about as long
FAULTS = ("full disk", "failing disk", "short writes", "slow disk", "stale folders", "damage")
_FULL_FOR = 100  # writing operations; a save makes about 65


@dataclass(frozen=True)
class Fault:
    """What happens to one attempt.

    Attributes:
        kind: of KILLS, INTERRUPTS or FAULTS, or LEAVE.
        share: how far into what is left of the run, in [0, 1).
        victim: the rank that it affects.
        everyone: whether all ranks are killed with it, as when a machine loses its power, or preempted.
        then: of a fault: how far into the run it is killed as well; None where it is not. Of what is preempted: how
            much of the longest notice it gets before it is killed. Of two interrupts: how much of the longest gap lies
            between them.
        at: the place itself, from 1, instead of a share.
    """

    kind: str
    share: float
    victim: int = 0
    everyone: bool = True
    then: float | None = None
    at: int | None = None

    @property
    def kills(self) -> bool:
        """Whether it may kill."""
        return self.kind in KILLS or (self.then is not None and not self.interrupts)

    @property
    def leaves(self) -> bool:
        """Whether it tells the run to leave."""
        return self.kind == LEAVE

    @property
    def interrupts(self) -> bool:
        """Whether it ends the run by an exception in it."""
        return self.kind in INTERRUPTS

    @property
    def gap(self) -> float:
        """Seconds between two interrupts."""
        return (self.then or 0.0) * _LONGEST_GAP

    @property
    def killer(self) -> Fault | None:
        """The kill in it, where that has a place of its own."""
        if self.leaves or self.interrupts:
            return None
        if self.then is None:
            return self if self.kills else None
        return Fault("between updates", self.then, self.victim, self.everyone)

    def place(self, counts: Mapping[str, int], left: float) -> int:
        """Which occurrence of its kind it strikes at, from 1; `left` is the share of the run that is to be made."""
        if self.at is not None:
            return self.at
        names = _events_of(self.kind) or (KILLS.get(self.kind) or _COUNTED.get(self.kind, "any"),)
        total = sum(counts.get(name, 0) for name in names)
        return 1 + int(self.share * max(1.0, total * left))


def _events_of(kind: str) -> tuple[str, ...]:
    return _EVERY_EVENT if kind == LEAVE else EVENTS.get(kind, ())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Counts(TrainerCallback):
    """How often each thing happens in a run to which nothing happens."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count("on_step_end")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count("on_substep_end")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count("on_pre_optimizer_step")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count("on_optimizer_step")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count("on_prediction_step")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count("on_epoch_begin")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count("on_epoch_end")


class Countdown:
    """Calls `strike` at its n-th call and those that follow, `times` in all, from whichever thread they come."""

    def __init__(self, calls: int, strike: Callable[[], None], times: int = 1) -> None:
        self._left, self._strike, self._times, self._lock = calls, strike, times, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            strikes = -self._times < self._left <= 0
        if strikes:
            self._strike()


def callbacks_of(fault: Fault, counts: Mapping[str, int], left: float) -> list[TrainerCallback]:
    """The callback that kills or preempts at an event, for a fault that does; see `Fault.place`."""
    if fault.leaves:
        return [_at_events(_EVERY_EVENT, Countdown(fault.place(counts, left), lambda: _tell(fault.then)))]
    names = () if fault.killer is None else _events_of(fault.killer.kind)
    if fault.killer is None or not names:
        return []
    return [_at_events(names, Countdown(fault.killer.place(counts, left), die))]


def _tell(notice: float | None) -> None:
    """As a scheduler that wants the machine back; some are less patient than others."""
    os.kill(os.getpid(), signal.SIGTERM)
    if notice is not None:
        threading.Timer(notice * _LONGEST_NOTICE, die).start()


def _at_events(names: Iterable[str], countdown: Countdown) -> TrainerCallback:

    def event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        countdown()

    return type("Striking", (TrainerCallback,), dict.fromkeys(names, event))()  # type: ignore[no-any-return]


def arm(fault: Fault, place: int) -> None:
    """Let the disk of this process behave as the fault says, until the process ends."""
    if fault.kind == UPLOADING:
        _at_remote_operation(Countdown(place, die))
    elif KILLS.get(fault.kind):
        at_operation(OPERATIONS[KILLS[fault.kind]], Countdown(place, die))
        if fault.kind == "while a file is written":
            _torn_writes()
    elif fault.kind == "failing disk":
        at_operation(OPERATIONS["any"], Countdown(place, lambda: _refuse(errno.EIO)))
    elif fault.kind == "full disk":
        at_operation(WRITES, Countdown(place, lambda: _refuse(errno.ENOSPC), times=_FULL_FOR))
    elif fault.kind == "short writes":
        _short_writes()
    elif fault.kind == "slow disk":
        at_operation(OPERATIONS["any"], lambda: time.sleep(0.003))


def count_operations(counts: Counts) -> None:
    """Count the operations of this process's disk, by what they are for, and those of its remote folder."""
    _at_remote_operation(lambda: counts.count("upload"))
    for name, operations in OPERATIONS.items():
        at_operation(operations, lambda name=name: counts.count(name))  # type: ignore[misc]


def _refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


def at_operation(operations: frozenset[str], call: Callable[[], None]) -> None:
    original = Files.before

    def before(self: Files, operation: str, path: Path) -> None:
        original(self, operation, path)
        if operation in operations:
            call()

    Files.before = before  # type: ignore[method-assign]


def _at_remote_operation(call: Callable[[], None]) -> None:
    original = RemoteFolder.before

    def before(self: RemoteFolder, operation: str, name: str) -> None:
        original(self, operation, name)
        call()

    RemoteFolder.before = before  # type: ignore[method-assign]


def _torn_writes() -> None:
    """A piece reaches the file in two halves, between which the process may be killed."""
    original = Files.write_some

    def write_some(self: Files, descriptor: int, piece: memoryview) -> int:
        half = original(self, descriptor, piece[: (len(piece) + 1) // 2])
        self.before("write", Path("second half"))
        return half + (original(self, descriptor, piece[half:]) if half < len(piece) else 0)

    Files.write_some = write_some  # type: ignore[method-assign]


def _short_writes() -> None:
    original = Files.write_some

    def write_some(self: Files, descriptor: int, piece: memoryview) -> int:
        return original(self, descriptor, piece[:1000])

    Files.write_some = write_some  # type: ignore[method-assign]
