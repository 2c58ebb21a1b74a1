"""Where the time of a run goes: each second of a session belongs to exactly one kind of work.

A session is one call of `train()`. `enter` ends the present kind and begins another, with one reading of the clock. The
seconds of a kind are those that the *host* spends in it. Work that is queued on an accelerator takes no host time until
the host waits for it, and these waits belong to `compute`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from windlass.core.logs import get_logger
from windlass.core.process_identity import process_age

logger = get_logger(__name__)

# Times and counts of a file are at most this: the year 9891 as a time.
LATEST = 2.5e11


class Moment(float):
    """When something began.

    As a number it is `time.time()`, which is what scripts and overrides of `Trainer.log` expect. The duration since it
    comes from the monotonic clock: the wall clock may be set back by an hour or a day while a run goes on.
    """

    _began: float

    def __new__(cls) -> Moment:
        made = super().__new__(cls, time.time())
        made._began = time.monotonic()
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy may be read in another process, whose monotonic clock is another one.
        return float, (float(self),)

    def elapsed(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._began


def seconds_since(moment: float) -> float:
    """Seconds since a `Moment`, or since a plain `time.time()`; never below zero."""
    return moment.elapsed() if isinstance(moment, Moment) else max(0.0, time.time() - moment)


# The names of the kinds, in the order of the numbers below.
KINDS = (
    "start_up",
    "data",
    "compute",
    "exchange",
    "update",
    "evaluation",
    "save",
    "upload",
    "callbacks",
    "repeated",
    "skipped",
)
START_UP, DATA, COMPUTE, EXCHANGE, UPDATE, EVALUATION, SAVE, UPLOAD, CALLBACKS, REPEATED, SKIPPED = range(11)
# Between two sessions; no session has it.
STOPPED = "stopped"
# The part of `compute` in which a rank may wait for others: the reduction of gradients is in the backward.
BACKWARD = 11
_OF_UPDATES = (DATA, COMPUTE, EXCHANGE, UPDATE, BACKWARD)
_FIRST, _LAST = DATA, UPDATE + 1  # of those that lie side by side
# What a rank does by itself in training, while others may wait for it.
_OWN = (DATA, COMPUTE, CALLBACKS)
_IN_TRAINING = (DATA, COMPUTE, EXCHANGE, UPDATE, CALLBACKS, REPEATED, SKIPPED)

Seconds = dict[str, float]


class ClockReading(NamedTuple):
    """What a clock shows."""

    began: float  # when the session began, in seconds since 1970
    elapsed: float  # seconds since then; the sum of `seconds`
    seconds: Seconds  # by kind, without those that have none
    kind: str  # the present one
    step: int  # updates that were done


class Interval(NamedTuple):
    """The time since the last report."""

    seconds: Seconds  # by kind
    training: float  # without start-up, evaluations, saves and uploads
    own: float  # what this rank did while others may have waited for it


class RunClock:
    """Attributes the time of one session after the other.

    Attributes:
        row: what the next row of `metrics.jsonl` gets under `timing`; set by the owner of the report.
        kind, since: the present kind, and when it began, which is when `clock` was last read.

    Args:
        clock: returns seconds of a clock that is never set.
        wall: returns seconds since 1970.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall = clock, wall
        self._thread: int | None = None  # that of the session under way
        self._claimed = False
        self._update_began: tuple[float, ...] = ()
        self._first = True
        self.row: dict[str, float] = {}
        self._restart(0.0)

    def _restart(self, earlier: float) -> None:
        self._seconds = [0.0] * (len(KINDS) + 1)
        self.kind, self._step, self._highest = START_UP, 0, 0
        self.since = self._began_at = self._clock() - earlier
        self._began = self._wall() - earlier
        self._mark_update()
        self._reported = list(self._seconds)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin a session in start-up, unless one is under way, as of a run within a callback; return True if it began.

        The first session of a script begins with its process, whose imports and loading are start-up too.
        """
        if self._thread is not None:
            if self._thread != threading.get_ident():
                logger.warning(
                    "another thread of this process trains at the same time. Both draw from the same generators of "
                    "PyTorch and share a clock, so neither can be repeated to the bit, and their times are mixed: "
                    "train each in a process of its own"
                )
            return False
        self._thread = threading.get_ident()
        is_script = hasattr(sys.modules.get("__main__"), "__file__") and not hasattr(sys, "ps1")
        earlier = process_age() if self._first and is_script and "ipykernel" not in sys.modules else None
        self._first = self._claimed = False
        self._restart(earlier or 0.0)
        return True

    def claim(self) -> bool:
        """Return True to the first caller in a session: what the clock shows is the time of its run."""
        claimed, self._claimed = self._claimed, True
        return self._thread is not None and not claimed

    def end(self) -> None:
        """End the session."""
        self._thread = None

    def not_before(self, moment: float) -> None:
        """Let the session begin no earlier than `moment` (seconds since 1970): the one before it ended then."""
        self.enter(self.kind)
        late = min(max(moment - self._began, 0.0), self._seconds[START_UP])
        self._began, self._began_at = self._began + late, self._began_at + late
        self._seconds[START_UP] -= late
        self._reported[START_UP] = min(self._reported[START_UP], self._seconds[START_UP])

    def continue_from(self, step: int, highest: int) -> None:
        """Begin the updates at `step`; those up to `highest` were done before, and are repeated."""
        self._step, self._highest = step, max(step, highest)

    # --- kinds --------------------------------------------------------------------------------------------------------

    def enter(self, kind: int) -> int:
        """End the present kind, and begin `kind`; return the one that ended, to enter it again."""
        now, before = self._clock(), self.kind
        self._seconds[before] += now - self.since
        self.since, self.kind = now, kind
        return before

    @contextmanager
    def within(self, kind: int) -> Iterator[None]:
        """Attribute the body to `kind`, except what enters another one."""
        before = self.enter(kind)
        try:
            yield
        finally:
            self.enter(before)

    def update_ends(self, step: int, applied: bool) -> None:
        """Called after update `step`, in `compute`: one that was not applied, or was done before, has its own kind."""
        seconds = self._seconds
        if not applied or step <= self._highest:
            self.enter(COMPUTE)
            kind = REPEATED if applied else SKIPPED
            for number, began in zip(_OF_UPDATES, self._update_began, strict=True):
                seconds[kind] += seconds[number] - began
                seconds[number] = began
        self._step = step
        if step > self._highest:
            self._highest = step
        self._update_began = (*seconds[_FIRST:_LAST], seconds[BACKWARD])

    def _mark_update(self) -> None:
        self._update_began = (*self._seconds[_FIRST:_LAST], self._seconds[BACKWARD])

    # --- reading it ---------------------------------------------------------------------------------------------------

    def read(self) -> ClockReading:
        """Return what it shows now. Another thread may call it: the seconds add up to those since the beginning."""
        seconds, kind, step = list(self._seconds), self.kind, self._step
        elapsed = self._clock() - self._began_at
        seconds[kind] += elapsed - sum(seconds)
        return ClockReading(self._began, elapsed, _named(seconds), KINDS[_whole(kind)], step)

    def interval(self) -> Interval:
        """Return the time since the last call."""
        self.enter(self.kind)
        self._mark_update()  # what was reported is not attributed again
        passed = [now - before for now, before in zip(self._seconds, self._reported, strict=True)]
        self._reported = list(self._seconds)
        training = sum(passed[kind] for kind in (*_IN_TRAINING, BACKWARD))
        return Interval(_named(passed), training, sum(passed[kind] for kind in _OWN))


def _whole(kind: int) -> int:
    return COMPUTE if kind == BACKWARD else kind


def _named(seconds: list[float]) -> Seconds:
    named = dict(zip(KINDS, seconds, strict=False))
    named["compute"] += seconds[BACKWARD]
    return {name: value for name, value in named.items() if value}


@cache
def run_clock() -> RunClock:
    """The clock of this process."""
    return RunClock()
