"""One call in a thread of its own, which an exception of a signal handler in the waiting thread does not disturb."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from windlass.dist.beacon import waiting

_POLL = 0.2  # seconds after which a waiter looks again, if the wake-up was lost to an interrupt


class BackgroundCall:
    """Runs `work` once in another thread. `start` and `wait` may be interrupted at any instant, and called again.

    `threading.Thread` cannot promise that. An exception that a signal handler raises in `Thread.join` makes a running
    thread count as ended (CPython before 3.13), so a second `join` returns at once and what the thread was to write is
    taken for written; one that is raised in `Thread.start` or `Event.wait` can leave their lock held for ever. Here
    whether the work has ended is a fact that only its own thread states.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name, self._work = name, work
        self._claim: dict[str, object] = {}
        self._running = _thread.allocate_lock()  # held until the work has ended: it wakes who waits
        self._running.acquire()
        self._launched = self._ended = False
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def succeeded(self) -> bool:
        """Whether the work has been done, to its end and without an error."""
        return self._ended and self.error is None

    def start(self) -> None:
        if self._launched:
            return
        try:
            _thread.start_new_thread(self._launch, (object(),))
        except RuntimeError:  # the system has no thread to give
            self._run(object())
        self._launched = True

    def _launch(self, token: object) -> None:
        # Signal handlers run in the main thread alone, so here it is safe to start a thread that has a name.
        try:
            threading.Thread(target=self._run, args=(token,), name=self._name, daemon=True).start()
        except RuntimeError:
            self._run(token)

    def wait(self) -> None:
        """Return once the work has ended; an error of it is in `error`."""
        self.start()  # does nothing, unless an interrupt prevented it
        if self._ended:
            return
        with waiting(f"wait for {self._name}"):
            while not self._ended:
                if self._running.acquire(timeout=_POLL):
                    self._running.release()

    def _run(self, token: object) -> None:
        # `start` may have been interrupted after it had launched a thread, and launch a second one.
        if self._claim.setdefault("by", token) is not token:
            return
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._ended = True
            self._running.release()
