"""How many threads a process has, and whether the machine has cores for them."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from windlass.core.logs import get_logger
from windlass.core.world import world_from_environment

logger = get_logger(__name__)

# The name under which a checkpoint's manifest has the number of threads that split one operation on the CPU.
THREADS = "threads"


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_and_threads(workers: int) -> int:
    """How many threads this job may run at once on this machine, if each of its processes has so many data workers."""
    import torch

    return world_from_environment().local_size * (torch.get_num_threads() + workers)


def warn_of_other_threads(meta: Mapping[str, Any], device_type: str, folder: object) -> None:
    """Warn if a checkpoint was saved by a process with another number of threads: sums on the CPU are then split
    differently, so the last bits of a resumed run differ.
    """
    import torch

    saved, here = meta.get(THREADS), torch.get_num_threads()
    if device_type == "cpu" and saved is not None and saved != here:
        logger.warning(
            "%s was saved with %s thread(s) per process, this process has %d: sums are split differently, so results "
            "agree to rounding and not to the bit. Set OMP_NUM_THREADS=%s to continue with the same bits",
            folder,
            saved,
            here,
            saved,
        )


class LoadWatch:
    """Logs once per run, on the first process of each machine, that other programs use the cores.

    Args:
        own: processes and threads of this job on this machine that may be running while it trains.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        self._enabled = hasattr(os, "getloadavg") and world_from_environment().is_local_main

    def look(self, *, training: bool) -> None:
        """Compare the load average of the last minute with the cores. `training`: the job itself has been running, so
        that its own threads are part of the load.
        """
        if not self._enabled:
            return
        try:
            load, cores = os.getloadavg()[0], os.cpu_count() or 1
        except OSError:  # a container without /proc: nothing is known of other programs
            self._enabled = False
            return
        others = load - (self._own if training else 0)
        if others < 1 or load < cores + 1:
            return
        self._enabled = False
        logger.info(
            "load average %.1f on %d core(s): other programs use the cores, so every step takes longer",
            load,
            cores,
        )


_TASKS = "/proc/self/task"
_RUNNING = ord("R")
_TICK = 0.0005


def wait_for_foreign_threads(patience: float = 0.05) -> bool:
    """Wait until every thread that Python did not start sleeps, at most `patience` seconds; return True if all do.

    To be called right before a fork. A thread of a process group that frees a tensor enters Python; if the fork comes
    between, the child inherits a lock that no thread will release. (CPython before 3.11.10 takes it in `os.fork`.)
    Such a thread sleeps before a collective and again once it has freed what belonged to it.

    Where the system has no list of threads (no `/proc`), returns True at once.
    """
    deadline = time.monotonic() + patience
    while _foreign_thread_runs():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK)  # it may need the interpreter to get done
    return True


def keep_inherited_garbage() -> None:
    """To be called in a process that was just forked: what it inherited is never collected there as garbage.

    Garbage may wait for the end of its threads, as the store of a process group does. They were not forked, and their
    memory may be that of threads which this process has started: such a wait aborts it.
    """
    gc.freeze()


@contextlib.contextmanager
def said_if_long(seconds: float, say: Callable[..., object], *values: object) -> Iterator[None]:
    """Around a wait: `say(*values)` is called if it lasts for so many seconds."""
    timer = threading.Timer(seconds, say, values)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def python_threads() -> list[threading.Thread]:
    """`threading.enumerate()`, in which no garbage is collected: it holds a lock that a thread needs to end, and
    garbage may wait for such an end, as torch's iterator does for the thread that pins its batches.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return threading.enumerate()
    finally:
        if collects:
            gc.enable()


def _foreign_thread_runs() -> bool:
    pythons = {thread.native_id for thread in python_threads()}
    pythons.add(threading.get_native_id())
    try:
        tasks = os.listdir(_TASKS)
    except OSError:
        return False
    return any(int(task) not in pythons and _state(task) == _RUNNING for task in tasks)


def _state(task: str) -> int:
    try:
        descriptor = os.open(f"{_TASKS}/{task}/stat", os.O_RDONLY)
    except OSError:
        return 0  # it has ended
    try:
        content = os.read(descriptor, 128)
    except OSError:
        return 0
    finally:
        os.close(descriptor)
    return content[content.rindex(b")") + 2]  # behind the name, which may contain anything
