"""Signals that a whole job gets: schedulers and terminals send them to its data workers, too, whose end would be the
run's. While a run takes such a signal, its workers leave it to the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

from windlass.core.parent import end_with_parent

_taken: set[int] = set()
_running: Any = None


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
    _tell_workers()
    try:
        yield
    finally:
        _taken.discard(number)
        _tell_workers()
        signal.signal(number, before)


@contextlib.contextmanager
def surviving_hangup() -> Iterator[None]:
    """Within the body the end of the terminal (SIGHUP) ends nothing: what is shown is lost, the
    work is not. A handler of the script's own, and `nohup`, stay as they are.
    """
    number = getattr(signal, "SIGHUP", None)
    main = threading.current_thread() is threading.main_thread()
    if number is None or not main or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    with taking(number, lambda _: None):
        yield


def _tell_workers() -> None:
    if _running is not None:
        _running.value = bool(_taken)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Called first in every data worker, with its number.

    Attributes:
        own: what the script wants to be called there.
        left: signals that workers leave to the run.
        running: shared with this process: whether a run takes them. Afterwards they end a worker, as whoever sends
            them to it then wants.
        from_main: the main thread starts the workers.
    """

    own: Callable[[int], Any] | None
    left: tuple[int, ...]
    running: Any
    from_main: bool

    @classmethod
    def now(cls, own: Callable[[int], Any] | None) -> WorkerStart:
        """For workers that are started while a run takes the signals that it takes now."""
        global _running
        if _running is None:
            _running = RawValue("b", 0)
        _tell_workers()
        from_main = threading.current_thread() is threading.main_thread()
        return cls(own, tuple(sorted(_taken)), _running, from_main)

    def __call__(self, worker: int) -> None:
        parent = multiprocessing.parent_process()
        # Torch's worker looks for its parent only while it waits for work. A server of forks stands in between: it ends
        # its children itself, and another thread than the main one may end before its process.
        if self.from_main and parent is not None and os.getppid() == parent.pid:
            end_with_parent(parent.pid)
        for number in self.left:
            signal.signal(number, self._leave)  # no SIG_IGN: programs that a worker starts would inherit that
        if self.own is not None:
            self.own(worker)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        if not self.running.value:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
