"""Portions of a dataset that has `__getitem__`: any position is reached at once."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.data.batch_reader import DealtBatch
from windlass.data.bookmark import Bookmark
from windlass.data.dealt_rows import Rows, cuts
from windlass.data.source import Source


class MapReader:
    """Reads this rank's part of each row, in this process or in workers.

    Reading leaves NumPy's and PyTorch's generators alone; in this process it takes two draws a batch from Python's.
    """

    def __init__(self, rows: Rows, source: Source, rank: int) -> None:
        self._rows, self._source, self._rank = rows, source, rank
        self._passes = 0
        self.unit, self.total_batch_size = rows.unit, rows.total_batch_size

    def read(self, epoch: int, start: int, bookmark: Bookmark | None = None) -> Iterator[DealtBatch]:
        tasks = cuts(self._rows.rows(epoch, start), 1, self._rank)
        # One pass at a time may use the lasting workers; a second one that runs beside it gets its own.
        private = self._passes > 0
        self._passes += 1
        try:
            for cut, (batch,) in self._source.batches(epoch, tasks, private):
                ids = [] if cut.filler else cut.batches[0]
                yield DealtBatch(batch, cut.shares, cut.end, cut.last, ids)
        finally:
            self._passes -= 1

    def accepts(self, unit: str) -> bool:
        return unit == self.unit

    def count(self, epoch: int, start: int = 0) -> int:
        return self._rows.count(epoch, start)

    def position(self, epoch: int, batches: int) -> int:
        return self._rows.position(epoch, batches)

    def reseed(self, seed: int) -> None:
        self._rows.reseed(seed)
        self._source.reseed(seed)
