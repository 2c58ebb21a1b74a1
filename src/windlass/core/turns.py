"""Run work on one process first, such as tokenising, whose result is cached on disk."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from windlass.core.attempt import of_attempt
from windlass.core.errors import PeerError
from windlass.core.world import World, meeting_place

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
        store.wait([key], timeout)
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


@functools.cache
def _store(rank: int, size: int) -> Any:
    """The store of this attempt of the job; the process group that is made later uses the same one."""
    from torch.distributed.rendezvous import rendezvous

    meeting_place()
    store, _, _ = next(rendezvous("env://", rank, size))
    return of_attempt(store)
