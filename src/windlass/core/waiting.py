"""How the threads of one operation wait for each other: they spin while cores are free, and sleep while they are not.

PyTorch's operations on the CPU are split over threads by libgomp. A thread that has done its part spins for about 3 ms
before it sleeps, which is fastest while the next operation follows at once and a core is free. Where other programs
want the cores, the spinning uses up the time that the thread waited for would need, and a step takes ten to a hundred
times as long. libgomp has an answer of its own: while a process has more threads than there are cores, each spins 100
times only (its manual, GOMP_SPINCOUNT). `ThreadWaiting` measures how long this process waits for a core, and brings
that state about, by threads that sleep, for as long as the wait lasts. How operations are split does not change, so
results keep their bits. Measured by benchmarks/contention.py.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from windlass.core.logs import get_logger

logger = get_logger(__name__)

# Any of these is a waiting policy of the user's own.
_POLICIES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
# Seconds over which a share is taken.
_WINDOW = 0.5
# The share of its time in which the main thread was ready to run and had no core. Spinning and sleeping take equally
# long at about 0.25; an idle machine has 0.00 to 0.01, one other program on two cores 0.4 to 0.5.
_TAKEN, _FREE = 0.25, 0.15


class ThreadWaiting:
    """Chooses between spinning and sleeping for the threads of this process.

    Args:
        waited: seconds for which the calling thread has waited for a core since it started; None if unknown.
        clock: seconds, monotonic.
        shorten: makes waits short from now on, and returns what ends that; None if it cannot.

    Attributes:
        due: the reading of `clock` from which on `look` chooses again; infinite if there is no choice.
    """

    def __init__(
        self,
        waited: Callable[[], float | None],
        clock: Callable[[], float],
        shorten: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._waited, self._clock, self._shorten = waited, clock, shorten
        self._since, self._waited_then = clock(), waited()
        self._lengthen: Callable[[], None] | None = None
        self.due = math.inf if self._waited_then is None else self._since + _WINDOW

    def look(self) -> None:
        """Called by the main thread between updates: choose again, at most twice a second."""
        now = self._clock()
        if now < self.due:
            return
        waited = self._waited()
        if waited is None or self._waited_then is None:
            self.due = math.inf
            return
        share = (waited - self._waited_then) / (now - self._since)
        self._since, self._waited_then, self.due = now, waited, now + _WINDOW
        if self._lengthen is None and share > _TAKEN:
            self._lengthen = self._shorten()
            if self._lengthen is None:
                self.due = math.inf
            logger.info("waiting for a core took %.0f %% of the time: threads sleep early", 100 * share)
        elif self._lengthen is not None and share < _FREE:
            self._lengthen()
            self._lengthen = None


@functools.cache
def thread_waiting() -> ThreadWaiting:
    """The choice of this process: there is one libgomp in it."""
    import torch

    stays = torch.get_num_threads() == 1 or any(name in os.environ for name in _POLICIES)
    waited = (lambda: None) if stays else _seconds_without_core
    return ThreadWaiting(waited, time.perf_counter, shorten_waits)


def _seconds_without_core() -> float | None:
    """Linux: the second number of /proc/thread-self/schedstat, nanoseconds on a run queue."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def shorten_waits() -> Callable[[], None] | None:
    """Add threads that do nothing to libgomp's, one more than there are cores. Returns what ends them; None if PyTorch
    was built with another library, or its file is gone.
    """
    path = _libgomp()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path)
    except OSError:  # an upgrade has replaced the file that this process has loaded
        return None
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    count = ctypes.c_uint((os.cpu_count() or 1) + 1)
    made, over = threading.Event(), threading.Event()

    def hold() -> None:
        # OpenMP keeps the threads of a region until its first thread exits. They run free(NULL), which does nothing.
        library.GOMP_parallel(free, None, count, ctypes.c_uint(0))
        made.set()
        over.wait()

    holder = threading.Thread(target=hold, name="windlass-waiting", daemon=True)
    holder.start()
    made.wait()

    def lengthen() -> None:
        over.set()
        holder.join()

    return lengthen


def _libgomp() -> str | None:
    """The file from which this process loaded libgomp."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
            path = line.partition("/")
            if "libgomp" in path[2].rpartition("/")[2]:
                return f"/{path[2]}"
    return None
