"""Signals that a whole job gets: schedulers and terminals send them to its data workers, too, whose end would be the
run's. While a run takes such a signal, its workers leave it to the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_taken: set[int] = set()


@contextlib.contextmanager
def taking(number: int, handle: Callable[[int], None]) -> Iterator[None]:
    """Within the body this process answers the signal with `handle`, and its workers leave it alone. On the main
    thread.
    """
    owner, before = os.getpid(), signal.getsignal(number)

    def answer(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handle(number)
        elif number == signal.SIGTERM:
            # A child that was forked from this process: whoever ends it by this signal shall succeed.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, answer)
    _taken.add(number)
    try:
        yield
    finally:
        _taken.discard(number)
        signal.signal(number, before)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Called first in every data worker, with its number.

    Attributes:
        own: what the script wants to be called there.
        left: signals that workers leave to the run.
    """

    own: Callable[[int], Any] | None
    left: tuple[int, ...]

    @classmethod
    def now(cls, own: Callable[[int], Any] | None) -> WorkerStart:
        """For workers that are started while a run takes the signals that it takes now."""
        return cls(own, tuple(sorted(_taken)))

    def __call__(self, worker: int) -> None:
        for number in self.left:
            # No SIG_IGN: programs that a worker starts would inherit that.
            signal.signal(number, _leave_once if number == signal.SIGTERM else _leave)
        if self.own is not None:
            self.own(worker)


def _leave(number: int, frame: FrameType | None) -> None:
    """The run acts on it."""


def _leave_once(number: int, frame: FrameType | None) -> None:
    """The run acts on it; who sends it again means this process."""
    signal.signal(number, signal.SIG_DFL)
