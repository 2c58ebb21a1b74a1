"""Garbage whose end, in a forked process, ends that process: threads that it waits for are not there."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import torch.distributed as dist


class _Cycle:
    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


def leave_a_store_behind() -> None:
    """A store with a thread, which nothing but the collector reaches. It does not run in this process any more."""
    gc.disable()
    _Cycle(dist.TCPStore("127.0.0.1", 0, 1, True))


def collect_among_threads() -> None:
    """Start threads, which take the memory of those that were not forked, and collect."""
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
    gc.collect()
