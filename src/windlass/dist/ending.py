"""How a process ends that has collectives under way which other ranks may never join.

Gloo cannot end an operation that was begun: to destroy its group, or to clear what holds it when the interpreter
ends, waits for all of them until the timeout of the group. So the groups of a rank that failed stay open, and the
process ends without them: the system closes its connections, and the other ranks get an error.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

from windlass.core.output import flush_standard_streams

# How long the interpreter may take for its end if this process cannot know its own exit code (seconds). On a busy
# machine it takes more than five: a run that was trained well would end with 1.
_LIMIT = 60.0
# Whether work that ranks share has failed on this one, and whether its groups were kept open.
_failed = _kept = False
# With what a process that `multiprocessing` started ends; None until it is known.
_status: int | None = None
# An error that was shown before a group was opened: that of an earlier cell of the notebook whose fork this process is.
_earlier: BaseException | None = None


# A note on an error of `exchanging`.
_LEFT = "Ranks exchanged parts of tensors here: others that wait for this one lose it when its process ends."
# Messages of process-group backends for a lost connection.
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process has terminated")


def lost_another_rank(error: BaseException) -> bool:
    """Return True if this is the error of a process group whose connection to another rank is lost."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(words in str(error) for words in _LOST)


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Around exchanges of tensors, one after another. An error of the body on one rank is not reported to the others:
    they are in the next of these exchanges, and not in one of reports.
    """
    try:
        yield
    except Exception as error:
        if not leaves_others(error):
            error.add_note(_LEFT)
        raise


def leaves_others(error: BaseException) -> bool:
    """Return True if another exchange, after this error, would only wait for ranks that are in an earlier one."""
    return _LEFT in getattr(error, "__notes__", ()) or lost_another_rank(error)


def note_failure() -> None:
    """Work that ranks share has failed here, so that other ranks may have left a collective, or wait for this one."""
    global _failed
    _failed = True


def ends_in_error() -> bool:
    """Return True after `note_failure`, while an exception is raised, or if an uncaught one ends the process."""
    return _failed or sys.exception() is not None or _uncaught() is not None


def keep_groups_open() -> None:
    """Keep all process groups until the process ends."""
    global _kept
    _kept = True


def _uncaught() -> BaseException | None:
    shown: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if shown is _earlier else shown


def _end() -> None:
    """End the process at once if groups are open. Handlers of its end that were registered later have been called."""
    if not _kept:
        return
    error = _uncaught()
    if error is None and _status is None:
        _end_later()
        return
    logging.shutdown()
    flush_standard_streams()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1 if error is not None else _status or 0)


def _end_later() -> None:
    """Let the interpreter end by itself: a script that caught the error chose an exit code, which is not known here."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    for group in list(c10d._world.pg_map):
        # A reference that nothing drops: also not the interpreter, when it clears its modules.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    # The destructors of libraries would run beside the threads of the groups. Only Linux has `on_exit`.
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # standard error has no descriptor
        faulthandler.dump_traceback_later(_LIMIT, exit=True)


def _note_status() -> None:
    """Called while the exception is raised that ends the work of a process of `multiprocessing`."""
    global _status
    error = sys.exception()
    if error is not None:
        code = error.code if isinstance(error, SystemExit) else 1
        _status = code if isinstance(code, int) else int(code is not None)


@functools.cache
def prepare_end() -> None:
    """Called before a process group is opened."""
    global _earlier
    _earlier = _uncaught()
    atexit.register(_end)
    if multiprocessing.parent_process() is not None:
        Finalize(None, _note_status, exitpriority=0)
