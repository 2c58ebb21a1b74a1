"""Portions of a stream that every rank reads as a whole, keeping its own part of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.config.plan import DataPlan
from windlass.core.errors import DataError
from windlass.core.types import Collator
from windlass.data.bookmark import Bookmark
from windlass.data.portion import Portion, shares_of
from windlass.data.stream import StreamReader, StreamRows, can_be_read_once
from windlass.dist.gang import Gang


class SharedStream:
    """Costs each reader the decoding of the whole stream, and buys an order that no number of ranks or workers changes.

    Args:
        row: samples of a whole batch over all ranks.
        plan: seed, workers, `drop_last`.
        gang: those who read the same stream; they make sure of that once.

    Raises:
        DataError: while iterating, on all ranks: they read different streams.
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
        gang: Gang,
    ) -> None:
        reader = StreamReader(dataset, collate, plan, row=row, world=world, rank=rank, may_be_empty=True)
        self._stream = StreamRows(reader, plan)
        self._dataset, self._world, self._drop_last = dataset, world, plan.drop_last
        self.total_batch_size = row
        self._gang, self._compared = gang, gang.size == 1
        self._passes, self._had_samples = 0, False

    def portions(self, epoch: int, start: int, bookmark: Bookmark | None = None) -> Iterator[Portion]:
        private, before = self._passes > 0, start
        self._passes += 1
        try:
            for row in self._stream.rows(epoch, start, private, bookmark):
                self._had_samples = True
                self._compare(row.mark)
                shares = shares_of(row.end - before, self._world)
                yield Portion(row.batch, shares, row.end, row.last, row.bookmark)
                before = row.end
            self._compare(None)  # of a rank that had no sample the others must hear too
            if before == 0 and self._had_samples:
                raise DataError(can_be_read_once(type(self._dataset).__name__, epoch))
        finally:
            self._passes -= 1

    def _compare(self, mark: int | None) -> None:
        """Streams that split themselves by rank, or shuffle as they like, would lose most of their samples here."""
        if self._compared:
            return
        self._compared = True
        if len(set(self._gang.gather_objects(mark))) > 1:
            raise DataError(
                f"the ranks read different samples from {type(self._dataset).__name__}: it splits itself by rank, or "
                "draws from a generator of its own that is seeded differently on each. Let it give the whole stream in "
                "the same order on every rank, or let the main process read for all: dispatch_batches=True."
            )

    def batches(self, epoch: int) -> int | None:
        if not hasattr(self._dataset, "__len__"):
            return None
        count = len(self._dataset)
        return count // self.total_batch_size if self._drop_last else -(-count // self.total_batch_size)

    def position(self, epoch: int, batches: int) -> int:
        return batches * self.total_batch_size

    def reseed(self, seed: int) -> None:
        self._stream.reseed(seed)
