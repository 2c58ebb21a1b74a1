"""Portions of a stream that every rank reads as a whole, keeping its own part of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.config.plan import DataPlan
from windlass.core.errors import DataError
from windlass.core.types import Collator
from windlass.data.batch_reader import DealtBatch, shares_of
from windlass.data.bookmark import Bookmark
from windlass.data.stream import StreamReader, StreamRow, StreamRows, can_be_read_once


class SharedStream:
    """Costs each reader the decoding of the whole stream, and buys an order that no number of ranks or workers changes.

    Args:
        row: samples of a whole batch over all ranks.
        plan: seed, workers, `drop_last`.
        world, rank: between how many ranks rows are dealt, and which of them this is; one for a part of its own.
    """

    unit = "samples"

    def __init__(
        self,
        dataset: Any,
        collate: Collator,
        plan: DataPlan,
        *,
        row: int,
        world: int,
        rank: int,
    ) -> None:
        reader = StreamReader(dataset, collate, plan, row=row, world=world, rank=rank, may_be_empty=True)
        self._stream = StreamRows(reader, plan)
        self.dataset, self._world, self._drop_last = dataset, world, plan.drop_last
        self.total_batch_size = row
        self._held: Iterator[StreamRow] | None = None
        self._passes, self._had_samples = 0, False

    def rows(self, epoch: int, start: int, bookmark: Bookmark | None = None) -> Iterator[StreamRow]:
        """The rows of a pass; one that runs beside another has workers of its own."""
        return self._stream.rows(epoch, start, self._passes > 0, bookmark)

    def read(self, epoch: int, start: int, bookmark: Bookmark | None = None) -> Iterator[DealtBatch]:
        held, self._held = self._held, None
        rows = self.rows(epoch, start, bookmark) if held is None else held
        before = start
        self._passes += 1
        try:
            for row in rows:
                self._had_samples = True
                shares = shares_of(row.end - before, self._world)
                yield DealtBatch(row.batch, shares, row.end, row.last, row.ids, row.bookmark)
                before = row.end
            if before == 0 and self._had_samples:
                raise DataError(can_be_read_once(type(self.dataset).__name__, epoch))
        finally:
            self._passes -= 1

    def hold(self, rows: Iterator[StreamRow]) -> None:
        """Read on in this pass, which was begun before, when dealt_batches are asked for next."""
        self._held = rows

    def accepts(self, unit: str) -> bool:
        return unit == self.unit

    def count(self, epoch: int, start: int = 0) -> int | None:
        if not hasattr(self.dataset, "__len__"):
            return None
        left, size = max(len(self.dataset) - start, 0), self.total_batch_size
        return left // size if self._drop_last else -(-left // size)

    def position(self, epoch: int, batches: int) -> int:
        return batches * self.total_batch_size

    def reseed(self, seed: int) -> None:
        self._stream.reseed(seed)
