"""The threads of this process that are not Python's: those of process groups, of autograd, of parallel regions."""

from __future__ import annotations

import os
import threading
import time

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


def _foreign_thread_runs() -> bool:
    pythons = {thread.native_id for thread in threading.enumerate()}
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
