"""Batches of a loader whose class has its own `__iter__`, taken unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.core.logs import get_logger
from windlass.core.trees import batch_size_of
from windlass.data.batch_reader import DealtBatch, PassRequest
from windlass.data.foreign_loader import loader_length
from windlass.data.seeding import set_epochs
from windlass.data.workers import START_TIMEOUT, Reader, read_batches

logger = get_logger(__name__)


class PassthroughReader:
    """One rank's batches, read one ahead to detect the last. A position is reached by reading up to it."""

    unit = "batches"

    def __init__(self, loader: Any, start_timeout: float = START_TIMEOUT) -> None:
        self._loader = loader
        self._reader = Reader(f"a prepared {type(loader).__name__}", start_timeout)

    @property
    def total_batch_size(self) -> int | None:
        return getattr(self._loader, "batch_size", None)

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        start = wanted.start
        if start:
            name = type(self._loader).__name__
            logger.warning(f"reading {start} batches of {name} again, to continue after them")
        set_epochs(wanted.epoch, self._loader, getattr(self._loader, "sampler", None))
        batches, done = read_batches(self._loader, self._reader), 0
        batch = next(batches, _END)
        while batch is not _END:
            following, done = next(batches, _END), done + 1
            if done > start:
                yield DealtBatch(batch, (batch_size_of(batch) or 1,), done, following is _END)
            batch = following

    def accepts(self, unit: str) -> bool:
        return unit == self.unit

    def count(self, epoch: int, start: int = 0) -> int | None:
        whole = loader_length(self._loader)
        return None if whole is None else max(whole - start, 0)

    def position(self, epoch: int, batches: int) -> int:
        return batches

    def reseed(self, seed: int) -> None:
        """Does nothing: the loader seeds itself."""


_END = object()
