"""Signals that schedulers and terminals send to a whole job, its data workers included. While a run handles such a
signal, its workers ignore it: a worker that ends would end the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

# From <sys/prctl.h>.
_SET_PARENT_DEATH_SIGNAL = 1
# How often a system without that call is asked who the parent is.
_LOOK_SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """Have this process killed as soon as process `parent` dies, whatever signals it handles and whatever it is doing.

    The kernel sends the signal when the *thread* that started this process ends: only for children of a thread that
    lives as long as its process.

    Args:
        parent: id of the process that started this one. If it is dead already, this process is killed now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    elif os.name == "posix":
        threading.Thread(target=_watch, args=(parent,), name="windlass-parent", daemon=True).start()
    # A parent that died before the request will not be reported any more.
    if os.getppid() != parent:
        _end()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    _end()


def _end_after(parent: Any) -> None:
    parent.join()
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_taken: list[int] = []  # a signal once for each run that handles it: one may run within another
_running: Any = None


def signal_name(number: int) -> str:
    """Return `"SIGTERM"` for 15; a number without a name is `"signal 77"`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def handling(number: int, handle: Callable[[int], None]) -> Iterator[None]:
    """Within the body this process calls `handle` for the signal, and its workers ignore it. Main thread only."""
    owner, before = os.getpid(), signal.getsignal(number)

    def answer(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handle(number)
        elif number == signal.SIGTERM:
            # A child that was forked from this process: SIGTERM must still end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, answer)
    _taken.append(number)
    _share_with_workers()
    try:
        yield
    finally:
        _taken.remove(number)
        _share_with_workers()
        signal.signal(number, before)


@contextlib.contextmanager
def handled_later() -> Iterator[None]:
    """For a fork, or a lock of a library: within the body no handler of a signal is called in this process; those of
    signals that came are called at its end. A process that is forked meanwhile, by this thread or another one, calls
    them as they come.

    An exception of a handler, such as KeyboardInterrupt, would leave behind a process that no caller knows; in a
    function that Python calls around the fork it would be lost. To block signals is not enough: another thread receives
    them, and the main thread calls the handlers all the same.
    """
    owner = os.getpid()
    handlers: dict[int, Any] = {}
    came: dict[int, FrameType | None] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            came[number] = frame
        else:
            handlers[number](number, frame)

    try:
        if threading.current_thread() is threading.main_thread():  # no other calls handlers
            for number in signal.valid_signals():
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, note)
        yield
    finally:
        for replaced, handler in handlers.items():
            signal.signal(replaced, handler)
        with contextlib.ExitStack() as calls:
            for received, frame in came.items():
                calls.callback(handlers[received], received, frame)


@contextlib.contextmanager
def surviving_hangup() -> Iterator[None]:
    """Within the body the end of the terminal (SIGHUP) is ignored; what is shown is lost. A handler of the script's
    own, and `nohup`, stay in effect.
    """
    number = getattr(signal, "SIGHUP", None)
    main = threading.current_thread() is threading.main_thread()
    if number is None or not main or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    with handling(number, lambda _: None):
        yield


def _share_with_workers() -> None:
    if _running is not None:
        _running.value = bool(_taken)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Called first in every data worker, with its number."""

    own: Callable[[int], Any] | None  # the script's own initializer
    left: tuple[int, ...]  # signals that workers ignore while the run handles them
    # Shared with this process: True while a run handles them. Afterwards they end a worker.
    running: Any
    from_main: bool  # the main thread starts the workers

    @classmethod
    def now(cls, own: Callable[[int], Any] | None) -> WorkerStart:
        """For workers that are started now: they ignore the signals that the run handles now."""
        global _running
        if _running is None:
            _running = RawValue("b", 0)
        _share_with_workers()
        from_main = threading.current_thread() is threading.main_thread()
        return cls(own, tuple(sorted(set(_taken))), _running, from_main)

    def __call__(self, worker: int) -> None:
        parent = multiprocessing.parent_process()
        # Torch's worker looks for its parent only while it waits for work, and never for one that died before that.
        if isinstance(multiprocessing.current_process(), ForkServerProcess):
            # A server of forks stands in between, which stays as long as its children do.
            threading.Thread(target=_end_after, args=(parent,), name="windlass-parent", daemon=True).start()
        elif parent is not None and parent.pid is not None:
            if self.from_main:  # another thread may end before its process
                end_with_parent(parent.pid)
            elif os.getppid() != parent.pid:
                _end()
        for number in self.left:
            # No SIG_IGN: programs that a worker starts would inherit that.
            signal.signal(number, self._ignore)
        if self.own is not None:
            self.own(worker)

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        if not self.running.value:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
