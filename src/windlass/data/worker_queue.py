"""What a loader and its data workers tell each other: batches, their errors, and that the loader was left."""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import multiprocessing.queues
import os
import queue
import shutil
import sys
import threading
import time
import weakref
from multiprocessing.reduction import DupFd, ForkingPickler
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from typing import Any

from torch._utils import ExceptionWrapper
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import get_worker_info

from windlass.core.errors import WorkerError
from windlass.core.job_signals import handled_later

# Not where it is needed: the import opens a file.
if sys.platform != "win32":
    import resource

_PIPE = 1 << 16  # bytes that a pipe holds
_LOOK_SECONDS = 0.2
_AFTER_CLOSING = -5  # the standard library's place for that join: the thread is closed before it
_SHARED = "/dev/shm"
# Words of torch and of the system where shared memory is full.
_FULL = ("shared memory", "shm", "No space left on device")
# Words of the system, and of Python where a message brought fewer files than were sent.
_TOO_MANY = ("Too many open files", "items of ancdata")


class WorkerQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """The standard library's queue, with one reader, who does not wait for ever for what cannot come.

    The thread of that queue prints an error and goes on. A worker that is killed while it writes leaves a message
    without an end, and the lock of the writers held: the reader would wait for that end, and the other workers, before
    they end, for that lock.
    """

    _thread: threading.Thread
    _jointhread: Finalize | None

    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            super().__init__(*args, **options)
        except OSError as error:  # its locks are files in shared memory
            if not (fix := advice(str(error))):
                raise
            raise WorkerError(f"data workers could not be started: {error}.{fix}") from error

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)  # type: ignore[misc]
        self._received = bytearray()
        if not after_fork:
            self._notempty = threading.Condition()  # whose lock knows which thread holds it

    def _start_thread(self) -> None:
        """Before a process ends, its thread must have let the lock go, which the other workers need. It may also wait
        for it, held by a worker that was killed: then the parent kills this one, or is dead.
        """
        super()._start_thread()  # type: ignore[misc]
        if self._jointhread is None:  # what is left in the queue is not wanted
            return
        self._jointhread.cancel()
        thread = weakref.ref(self._thread)
        self._jointhread = Finalize(self._thread, _join, [thread, os.getppid()], exitpriority=_AFTER_CLOSING)

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        try:
            super().put(obj, block, timeout)
        except BaseException:
            # Ctrl-C, before the block began that releases the lock, for which the end of a pass waits.
            with contextlib.suppress(RuntimeError):  # another thread holds it, or none
                self._notempty.release()
            raise

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next message. Raises queue.Empty if it is not whole within `timeout`; a further call goes on with it."""
        if sys.platform == "win32":  # there a message is written as a whole
            return super().get(block, timeout)
        reader, places = self._reader, self._sem  # type: ignore[attr-defined]
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (message := _taken_from(self._received)) is None:
            left = max(deadline - time.monotonic(), 0.0) if block else 0.0
            if not multiprocessing.connection.wait([reader], None if left == math.inf else left):
                raise queue.Empty
            if not (some := os.read(reader.fileno(), _PIPE)):
                raise EOFError
            self._received += some
        places.release()
        try:
            return ForkingPickler.loads(message)
        except (OSError, RuntimeError) as error:
            if not (fix := advice(str(error))):
                raise
            raise WorkerError(
                f"a batch that a data worker read could not be received: {error}.{fix}"
            ) from error

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        place, *_ = item
        info = get_worker_info()
        who = f"data worker {info.id} (pid {os.getpid()})" if info is not None else "the loader"
        self.put((place, _NotSent(f"{who} could not send what it read: {error!r}.{advice(str(error))}")))


def _join(thread: weakref.ref[threading.Thread], parent: int) -> None:
    """Wait for the end of a worker's thread that sends, as long as process `parent` lives."""
    sending = thread()
    while sending is not None and sending.is_alive() and os.getppid() == parent:
        sending.join(_LOOK_SECONDS)


def _taken_from(received: bytearray) -> bytearray | None:
    """Take the first message off the bytes of a `multiprocessing.Connection`; None if it is not whole."""
    start, size = 4, int.from_bytes(received[:4], "big", signed=True)
    if size == -1:  # the size follows, of more than 2 GiB
        start, size = 12, int.from_bytes(received[4:12], "big")
    end = start + size
    if len(received) < start or len(received) < end:
        return None
    message = received[start:end]
    del received[:end]
    return message


def start_handover() -> None:
    """In a worker: start the thread of the standard library from which the loader fetches the tensors of batches.

    It would start with the first tensor. Where the system then has no thread to give, that library takes it for
    started: the loader waits for ever for the next tensor.

    Raises:
        WorkerError: there is no thread.
    """
    if get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return
    try:
        with open(os.devnull, "rb") as nothing:
            DupFd(nothing.fileno())
    except RuntimeError as error:
        raise WorkerError(
            f"there is no thread that hands batches over: {error}. Raise the limit of processes and threads "
            "(ulimit -u; docker run --pids-limit), or set fewer workers (dataloader_num_workers, 0 for none)."
        ) from error


class WorkerEvent:
    """What tells workers that their loader has been left, without the lock of the standard library's event.

    A worker looks at it before each batch. Killed there, it would hold that lock for ever, and with it its parent.
    """

    def __init__(self) -> None:
        with handled_later():  # an exception of a handler would leave the allocator of shared memory damaged
            self._flag = RawValue("b", False)

    def is_set(self) -> bool:
        return bool(self._flag.value)

    def set(self) -> None:
        self._flag.value = True


class _NotSent(ExceptionWrapper):
    """Comes in place of a batch, in its order; a `DataLoader` calls `reraise` on it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def reraise(self) -> None:
        raise WorkerError(self.text)


def advice(problem: str) -> str:
    """What to do about `problem`; empty if it mentions neither shared memory nor open files."""
    if any(words in problem for words in _TOO_MANY):
        return (
            f" Each tensor of a batch that is handed over is an open file, and a process may have {_open_files()} "
            "files open. Raise the limit before the start (ulimit -n 65536; docker run --ulimit nofile=65536), call "
            "torch.multiprocessing.set_sharing_strategy('file_system') in the script, or set fewer workers "
            "(dataloader_num_workers, 0 for none) or a smaller prefetch factor (dataloader_prefetch_factor)."
        )
    if not any(words in problem for words in _FULL):
        return ""
    return (
        f" Batches are handed over in shared memory, and there is too little of it{_room()}. Give the container more "
        "(docker run --shm-size=2g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm), or set "
        "smaller batches, fewer workers (dataloader_num_workers, 0 for none) or a smaller prefetch factor "
        "(dataloader_prefetch_factor)."
    )


def _open_files() -> str:
    """The limit of this process, which its workers inherit; such errors are of systems that have one."""
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _room() -> str:
    try:
        total, _, free = shutil.disk_usage(_SHARED)
    except OSError:
        return ""
    return f": {_SHARED} has {total / 2**20:,.1f} MiB, of which {free / 2**20:,.1f} are free"
