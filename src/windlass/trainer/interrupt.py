"""Ctrl-C ends a run between two updates, never inside one, so that what is saved can be resumed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stopping_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within the body the first Ctrl-C calls `stop`; a second one interrupts at once.

    Only the main thread can take signals; elsewhere (and where the script set its own handler) nothing changes.
    """
    takes_signals = threading.current_thread() is threading.main_thread()
    if not takes_signals or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
