"""Batches of a dataset that has `__getitem__`: any position is reached at once."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.data.batch_reader import DealtBatch, PassRequest
from windlass.data.dealt_rows import Rows
from windlass.data.source import Source


class MapReader:
    """Reads this rank's part of each row, in this process or in workers.

    Reading leaves NumPy's and PyTorch's generators unchanged, and draws two numbers per batch from Python's.
    """

    def __init__(self, rows: Rows, source: Source, rank: int) -> None:
        self._rows, self._source, self._rank = rows, source, rank
        self.unit, self.total_batch_size = rows.unit, rows.total_batch_size

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        tasks = self._rows.batches(wanted.epoch, wanted.start, self._rank)
        # The run that was interrupted has read the first update already: see `PassRequest.update`.
        isolated = wanted.update if wanted.start else 0
        return self._source.batches(wanted.epoch, tasks, wanted.private, isolated)

    def count(self, epoch: int, start: int = 0) -> int:
        return self._rows.count(epoch, start)

    def position(self, epoch: int, batches: int) -> int:
        return self._rows.position(epoch, batches)

    def reseed(self, seed: int) -> None:
        self._rows.reseed(seed)
        self._source.reseed(seed)
