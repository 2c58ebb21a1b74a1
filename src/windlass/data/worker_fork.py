"""Fork a data worker so that no inherited lock or signal can block it; one that does not start is replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import popen_fork
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

from windlass.core.errors import WorkerError
from windlass.core.job_signals import handled_later, signal_name
from windlass.core.logs import get_logger
from windlass.core.threads import keep_inherited_garbage, wait_for_foreign_threads
from windlass.data.worker_queue import WorkerEvent
from windlass.dist.beacon import beacon

if sys.platform == "linux":
    import fcntl

logger = get_logger(__name__)

# A lock that a thread of this process holds for long would stop one worker after the other.
_ATTEMPTS = 4
# Seconds for which a worker may go on with what it reads when its loader is left.
_GRACE = 1.0
# Signals that a process sends itself by an error: blocked, they would end it without a trace.
_FAULTS = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"}


class _Entrance(NamedTuple):
    """What a worker needs to sign on: the pipe to its parent, and its final signal mask."""

    read: int
    write: int
    mask: set[Any]


def sign_on() -> None:
    """Tell the parent that this worker runs, and receive signals from now on; a no-op anywhere else.

    To be called in the worker once its signal handlers are set, before any code of the user.
    """
    process = multiprocessing.current_process()
    if not isinstance(process, WorkerProcess) or process.entrance is None:
        return
    (read, write, mask), process.entrance = process.entrance, None
    os.close(read)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone, which the worker notices by itself
        os.write(write, b"\0")
    os.close(write)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class WorkerProcess(ForkProcess):
    """A forked process whose `start` returns when the child has called `sign_on`.

    A loader that is left before its end joins each of its workers, ends with `terminate` those that are still busy, and
    joins them again: with torch's five seconds each, and a signal that workers ignore, a run that is to leave would
    wait for ten seconds a worker.

    Attributes:
        number: of the worker in its pool.
        patience: seconds after which a child that has not signed on is killed and forked again.
        left: whether its loader was left.
        entrance: in a child that has not signed on.
    """

    number = 0
    patience = 30.0
    left: WorkerEvent
    entrance: _Entrance | None = None

    def run(self) -> None:
        keep_inherited_garbage()
        super().run()

    def join(self, timeout: float | None = None) -> None:
        super().join(None if timeout is None else min(timeout, _GRACE))

    def terminate(self) -> None:
        self.left.set()  # torch had no time to do so where Ctrl-C comes at the end of a pass
        self.kill()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 (the name is the standard library's)
        return _Popen(process_obj)


class _Popen(popen_fork.Popen):
    pid = 0  # where none was forked

    def _launch(self, process_obj: Any) -> None:
        number, patience = process_obj.number, process_obj.patience
        for attempt in range(1, _ATTEMPTS + 1):
            beacon().call(f"start of data worker {number}")
            wait_for_foreign_threads()
            self.pid = 0
            read, write = os.pipe()
            try:
                self._fork(process_obj, read, write)
                with dying_with_this(self.pid):
                    if self._signs_on(read, number, patience):
                        return
            except BaseException:
                self._end()
                raise
            finally:
                os.close(read)
            self._end()
            if attempt < _ATTEMPTS:
                logger.warning(
                    f"data worker {number} (pid {self.pid}) did not start within {patience:g} s and is replaced: a "
                    "lock that another thread held while the process was forked stays locked in the worker. It had "
                    "read nothing yet, so the data are not affected"
                )
        raise WorkerError(
            f"data worker {number} did not start within {patience:g} s in {_ATTEMPTS} attempts. Another thread of this "
            "process holds a lock whenever it is forked, or the machine is overloaded. Raise the time "
            "(dataloader_start_timeout, or the variable WINDLASS_WORKER_START_TIMEOUT), or start "
            "workers by another method (dataloader_multiprocessing_context='forkserver' or 'spawn')."
        )

    def _fork(self, process_obj: Any, read: int, write: int) -> None:
        """Fork a child that writes its sign into the pipe."""
        blocked = {number for number in signal.valid_signals() if signal_name(number) not in _FAULTS}
        with handled_later():
            # A signal to the whole job must not meet a worker between the handlers of its parent and its own.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            process_obj.entrance = _Entrance(read, write, mask)
            try:
                super()._launch(process_obj)  # type: ignore[misc]  # the child does not return from here
            finally:
                process_obj.entrance = None
                os.close(write)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _signs_on(self, read: int, number: int, patience: float) -> bool:
        """Wait for the child's sign; False if none comes in time. Raises WorkerError if the child ended before it
        called `sign_on`.
        """
        if not multiprocessing.connection.wait([read], patience):
            return False
        if os.read(read, 1):
            return True
        code = self.wait(patience)  # its end of the pipe is closed a little before it has ended
        if code is None:
            return False
        raise WorkerError(
            f"data worker {number} (pid {self.pid}) {how_it_ended(code)} before it read anything."
        )

    def _end(self) -> None:
        if self.pid == 0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # any other signal is blocked in it
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        if self.finalizer is not None:
            self.finalizer()


@contextlib.contextmanager
def dying_with_this(pid: int) -> Iterator[None]:
    """Within the body the system kills the child `pid` if this process dies: one that hangs in its fork cannot ask for
    that itself. Linux only.

    A reader of a pipe may have a signal sent when the last writer is gone, and choose which, and to whom. Of a process
    that dies Linux closes the files last to first: the writer before the reader.
    """
    if sys.platform != "linux":
        yield
        return
    read, write = os.pipe()
    flags = fcntl.fcntl(read, fcntl.F_GETFL)
    try:
        with contextlib.suppress(OSError):  # a sandbox need not know it
            fcntl.fcntl(read, fcntl.F_SETOWN, pid)
            fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(read, fcntl.F_SETFL, flags | os.O_ASYNC)
        yield
    finally:
        # Another thread may have forked a child meanwhile, which has this pipe, too, and ends some day.
        fcntl.fcntl(read, fcntl.F_SETFL, flags)
        os.close(read)
        os.close(write)


def how_it_ended(code: int) -> str:
    """An exit code of `multiprocessing` in words."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
