"""Moments from which durations are measured, whatever happens to the clock on the wall."""

from __future__ import annotations

import time

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

    def elapsed(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._began


def seconds_since(moment: float) -> float:
    """Seconds since a `Moment`, or since a plain `time.time()`; never below zero."""
    return moment.elapsed() if isinstance(moment, Moment) else max(0.0, time.time() - moment)
