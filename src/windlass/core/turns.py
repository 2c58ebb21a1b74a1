"""Run work on one process first, such as tokenising, whose result is cached on disk."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from windlass.core.attempt import open_store_of_job
from windlass.core.errors import PeerError
from windlass.core.world import World

_turn = itertools.count()


@contextmanager
def main_process_first(world: World, local: bool, description: str, timeout: timedelta) -> Iterator[None]:
    """Run the body on the main process (of each machine with `local`) first, then on the others.

    The processes communicate by the launcher's key-value store, because scripts call this before there is a process
    group. All processes must make the same calls in the same order. Raises PeerError if the main process failed, so
    its result is missing.
    """
    if not world.is_distributed:
        yield
        return
    store = _store(world.rank, world.size)
    key = f"windlass/first/{next(_turn)}/{world.machine if local else 'all'}"
    if not (world.is_local_main if local else world.is_main):
        _wait(store, key, description, timeout)
        if store.get(key) != b"done":
            raise PeerError(f"the main process failed at {description!r}; see its own error")
        yield
        return
    try:
        yield
    except BaseException:  # also Ctrl-C: the others would wait for as long as `timeout`
        store.set(key, "failed")
        raise
    store.set(key, "done")


def _wait(store: Any, key: str, description: str, timeout: timedelta) -> None:
    # Here, because a torch that was built without distribution has none.
    from torch.distributed import DistNetworkError, DistStoreError

    try:
        store.wait([key], timeout)
    except DistStoreError:
        seconds = timeout.total_seconds()
        raise PeerError(
            f"timed out waiting for the main process, which has not ended {description!r} after {seconds:g} s: give "
            "ddp_timeout more seconds, or do this before the job"
        ) from None
    except DistNetworkError as error:
        raise PeerError(f"connection closed by the main process, before it ended {description!r}") from error


@functools.cache
def _store(rank: int, size: int) -> Any:
    """The store of this attempt of the job; the process group that is made later uses the same one."""
    return open_store_of_job(rank, size)
