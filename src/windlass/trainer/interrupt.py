"""Signals end a run between two updates, never inside one, so that what is saved can be resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

from windlass.core.job_signals import taking


@contextlib.contextmanager
def stopping_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within the body the first Ctrl-C calls `stop`; a second one interrupts at once.

    Only the main thread can take signals; elsewhere (and where the script set its own handler) nothing changes.
    """
    takes_signals = threading.current_thread() is threading.main_thread()
    if not takes_signals or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    with taking(signal.SIGINT, handle):
        yield


@contextlib.contextmanager
def told_by_signals(names: Iterable[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Within the body the first of these signals calls `tell` with its name; later ones change nothing.

    Only the main thread can take signals; a signal that this system does not have, and one for which the script has a
    handler of its own, is left alone.
    """
    told = False

    def handle(number: int) -> None:
        nonlocal told
        if not told:
            told = True
            tell(signal.Signals(number).name)

    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in names if hasattr(signal, name)):
                if signal.getsignal(number) is signal.SIG_DFL:
                    stack.enter_context(taking(number, handle))
        yield


def say(text: str) -> None:
    """A line on stderr from within a signal handler, which may have interrupted a print: past all buffers."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"windlass: {text}\n".encode())


class Deadline:
    """Ends the process at once where it has not ended by itself in time.

    Args:
        seconds: from `start` on; None never.
        last_words: what to say then.
    """

    def __init__(self, seconds: float | None, code: int, last_words: Callable[[], str]) -> None:
        self._seconds, self._code, self._last_words = seconds, code, last_words
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        if self._seconds is not None and self._timer is None:
            self._timer = threading.Timer(self._seconds, self._end)
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        say(self._last_words())
        os._exit(self._code)
