"""Processes that end when the process that started them dies, because nothing else would end them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

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


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
