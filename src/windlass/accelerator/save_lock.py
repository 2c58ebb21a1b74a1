"""Two loops that save into one folder do so one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from windlass.checkpoint.run_lock import RunLock
from windlass.checkpoint.store import Store


@contextmanager
def only_saver(store: Store, step: int) -> Iterator[None]:
    """Keep other loops from saving into the folder of `step` within the body. Collective.

    Raises:
        FolderInUse: another loop is saving there, and does not end within a few seconds.
    """
    lock = RunLock(store.root, f".windlass-{store.path_for(step).name}.lock")

    def take() -> None:
        if store.keeps:
            store.root.mkdir(parents=True, exist_ok=True)
            lock.acquire()

    try:
        store.agree(step, take)
        yield
    finally:
        lock.release()
