"""Portions of a dataset that has `__getitem__`: any position is reached at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from windlass.data.bookmark import Bookmark
from windlass.data.portion import Portion
from windlass.data.rows import Row, Rows
from windlass.data.source import Source


class _Task(NamedTuple):
    batches: list[list[int]]
    ids: list[int]
    shares: tuple[int, ...]
    end: int
    last: bool


class MapReader:
    """Reads this rank's part of each row, in this process or in workers.

    Reading leaves NumPy's and PyTorch's generators alone; in this process it takes two draws a batch from Python's.
    """

    def __init__(self, rows: Rows, source: Source, rank: int) -> None:
        self._rows, self._source, self._rank = rows, source, rank
        self._passes = 0
        self.unit, self.total_batch_size = rows.unit, rows.total_batch_size

    def portions(self, epoch: int, start: int, bookmark: Bookmark | None = None) -> Iterator[Portion]:
        tasks = (self._task(row) for row in self._rows.rows(epoch, start))
        # One pass at a time may use the lasting workers; a second one that runs beside it gets its own.
        private = self._passes > 0
        self._passes += 1
        try:
            for task, (batch,) in self._source.batches(epoch, tasks, private):
                yield Portion(batch, task.shares, task.end, task.last, task.ids)
        finally:
            self._passes -= 1

    def accepts(self, unit: str) -> bool:
        return unit == self.unit

    def batches(self, epoch: int) -> int:
        return self._rows.count(epoch)

    def position(self, epoch: int, batches: int) -> int:
        return self._rows.position(epoch, batches)

    def reseed(self, seed: int) -> None:
        self._rows.reseed(seed)
        self._source.reseed(seed)

    def _task(self, row: Row) -> _Task:
        own = row.parts[self._rank]
        filler = next(part for part in row.parts if part)[:1]
        return _Task([own or filler], own, tuple(map(len, row.parts)), row.end, row.last)
