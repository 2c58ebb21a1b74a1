"""The queue through which a data worker hands over batches: what cannot be sent is an error for who waits for it."""

from __future__ import annotations

import multiprocessing.queues
import os
import shutil
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from windlass.core.errors import WorkerError

_SHARED = "/dev/shm"
# Words of torch and of the system where shared memory is full.
_FULL = ("shared memory", "shm", "No space left on device")


class WorkerQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """The standard library's queue, whose thread prints an error and goes on: its reader would wait for ever."""

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        place, *_ = item
        info = get_worker_info()
        who = f"data worker {info.id} (pid {os.getpid()})" if info is not None else "the loader"
        self.put((place, _NotSent(f"{who} could not send what it read: {error!r}.{advice(str(error))}")))


class _NotSent(ExceptionWrapper):
    """Comes in place of a batch, in its order; a `DataLoader` calls `reraise` on it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def reraise(self) -> None:
        raise WorkerError(self.text)


def advice(problem: str) -> str:
    """What to do about `problem`; empty if it does not mention shared memory."""
    if not any(words in problem for words in _FULL):
        return ""
    return (
        f" Batches are handed over in shared memory, and there is too little of it{_room()}. Give the container more "
        "(docker run --shm-size=2g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm), or set "
        "smaller batches, fewer workers (dataloader_num_workers, 0 for none) or a smaller prefetch factor "
        "(dataloader_prefetch_factor)."
    )


def _room() -> str:
    try:
        total, _, free = shutil.disk_usage(_SHARED)
    except OSError:
        return ""
    return f": {_SHARED} has {total / 2**20:,.1f} MiB, of which {free / 2**20:,.1f} are free"
