"""Portions of a stream of which the first pass shows who deals its samples to the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.data.batch_reader import BatchReader, DealtBatch
from windlass.data.bookmark import Bookmark
from windlass.data.lockstep_reader import LockstepReader
from windlass.data.same_stream import begin_together
from windlass.data.shared_stream import SharedStream
from windlass.data.stream import StreamRow
from windlass.dist.gang import Gang


class AgreedStream:
    """Deals a stream that all ranks read alike, and leaves one that splits itself as it is.

    Args:
        common: this rank's share of the stream that all ranks read.
        part: all that this rank reads.
        gang: the ranks. They compare their first samples once, when the first pass begins.
        counted: the sizes of the common stream's batches are known only to the rank that reads them.

    Raises:
        DataError: while iterating, on all ranks: they read different samples that cannot be read again.
    """

    def __init__(
        self, common: SharedStream, part: SharedStream, gang: Gang, *, rank: int, counted: bool
    ) -> None:
        self._common, self._part, self._gang, self._counted = common, part, gang, counted
        self._shared: BatchReader = LockstepReader(common, rank, gang) if counted else common
        self._own: BatchReader = LockstepReader(part, 0, gang, own_parts=True)
        self._reader: BatchReader = self._shared
        self._agreed = False

    @property
    def unit(self) -> str:
        return self._reader.unit

    def accepts(self, unit: str) -> bool:
        """A saved position shows who dealt the samples before it."""
        if not self._agreed and unit == self._own.unit:
            self._reader, self._agreed = self._own, True
        return self._reader.accepts(unit)

    @property
    def total_batch_size(self) -> int | None:
        return self._reader.total_batch_size

    def read(self, epoch: int, start: int, bookmark: Bookmark | None = None) -> Iterator[DealtBatch]:
        if not self._agreed:
            self._agree(epoch, start, bookmark)
        yield from self._reader.read(epoch, start, bookmark)

    def _agree(self, epoch: int, start: int, bookmark: Bookmark | None) -> None:
        samples = self._common.position(epoch, start) if self._counted else start

        def begin(own_parts: bool) -> Iterator[StreamRow]:
            return (self._part if own_parts else self._common).rows(epoch, samples, bookmark)

        own_parts, rows = begin_together(begin, self._gang, self._common.dataset)
        if own_parts and start:
            raise DataError(
                f"the ranks read different samples behind {start} {self.unit} of "
                f"{type(self._common.dataset).__name__}, where the loop is continued: it splits itself by rank. Begin "
                "the pass anew, or let the stream give all samples on every rank."
            )
        if own_parts and self._part.total_batch_size * self._gang.size != self._common.total_batch_size:
            fix = (
                f"{type(self._common.dataset).__name__} splits itself, so every rank cuts its own batches, and a batch "
                f"size of {self._common.total_batch_size} is no multiple of {self._gang.size} processes"
            )
            raise ConfigError(Problem("split_batches", True, fix))
        self._agreed = True
        self._reader = self._own if own_parts else self._shared
        (self._part if own_parts else self._common).hold(rows)

    def count(self, epoch: int, start: int = 0) -> int | None:
        return self._reader.count(epoch, start)

    def position(self, epoch: int, batches: int) -> int:
        return self._reader.position(epoch, batches)

    def reseed(self, seed: int) -> None:
        self._shared.reseed(seed)
        self._own.reseed(seed)
