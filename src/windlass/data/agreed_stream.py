"""A stream that the ranks compare when its first pass begins: either they deal its samples, or it splits itself."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.data.batch_reader import BatchReader, DealtBatch, PassRequest
from windlass.data.lockstep_reader import LockstepReader
from windlass.data.same_stream import begin_together
from windlass.data.stream import SharedStream
from windlass.dist.gang import Gang


class AgreedStream:
    """Deals a stream that all ranks read alike, and leaves one that splits itself unchanged.

    Args:
        common: this rank's share of the stream that all ranks read.
        part: everything that this rank reads.
        data_ranks: the ranks. They compare their first samples once.
        lockstep: with own parts, every rank gets as many batches as the longest part has. Otherwise a rank's batches
            end with its part, and the caller keeps the ranks in step.
        counted: the sizes of the common stream's batches are known only to the rank that reads them.
        may_be_empty: a rank may have no sample while others have some.

    Attributes:
        agreed: the ranks have compared their samples, or need not.

    Raises:
        DataError: at the first `read`, on all ranks: they read different samples that cannot be read again.
    """

    def __init__(
        self,
        common: SharedStream,
        part: SharedStream,
        data_ranks: Gang,
        *,
        lockstep: bool,
        counted: bool = False,
        may_be_empty: bool = False,
    ) -> None:
        self._common, self._part, self._data_ranks = common, part, data_ranks
        self._counted, self._may_be_empty = counted, may_be_empty
        self._shared: BatchReader = LockstepReader(common, data_ranks) if counted else common
        self._own: BatchReader = LockstepReader(part, data_ranks, own_parts=True) if lockstep else part
        self._reader: BatchReader = self._shared
        self.agreed = data_ranks.size == 1

    @property
    def own_parts(self) -> bool:
        """Every rank reads a part of its own."""
        return self._reader is self._own

    @property
    def unit(self) -> str:
        return self._reader.unit

    @property
    def total_batch_size(self) -> int | None:
        return self._reader.total_batch_size

    def continue_from(self, unit: str) -> None:
        """Read this rank's own part if `unit`, that of a saved position, shows that the stream split itself before."""
        # The two differ only in a user's loop (`lockstep`); a Trainer passes the number of parts to `_opened`.
        if not self.agreed and unit == self._own.unit != self._shared.unit:
            self.take_own_parts()

    def take_own_parts(self) -> None:
        """Read this rank's own part; the stream is known to split itself."""
        self._reader, self.agreed = self._own, True

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        self.agree(wanted)
        return self._reader.read(wanted)

    def agree(self, wanted: PassRequest) -> None:
        """Compare the first samples, if that was not done before. Collective. The pass is kept for `read`."""
        if self.agreed:
            return
        start = wanted.start
        if self._counted:
            # A counted position is a number of batches, and the streams count samples.
            wanted = wanted.at(self._common.position(wanted.epoch, wanted.start))

        def begin(own_parts: bool) -> Iterator[DealtBatch]:
            return (self._part if own_parts else self._common).read(wanted)

        own_parts, rows = begin_together(
            begin, self._data_ranks, self._common.dataset, may_be_empty=self._may_be_empty
        )
        self.agreed = True
        if own_parts:
            self._refuse_own_parts(start)
            self.take_own_parts()
        # The pass has begun, and some streams can be begun only once: the next `read` goes on with it.
        (self._part if own_parts else self._common).hold(wanted, rows)

    def _refuse_own_parts(self, start: int) -> None:
        name = type(self._common.dataset).__name__
        if start:
            raise DataError(
                f"the ranks read different samples after {start} {self.unit} of {name}, where reading continues: it "
                "splits itself by rank now, and returned all samples on every rank before. Begin the pass again, "
                "continue on one process, or let it return all samples on every rank."
            )
        size, ranks = self._common.total_batch_size, self._data_ranks.size
        if self._part.total_batch_size * ranks != size:
            fix = (
                f"{name} splits itself, so every rank cuts its own batches, and a batch size of {size} is not a "
                f"multiple of {ranks} processes"
            )
            raise ConfigError(Problem("split_batches", True, fix))

    def count(self, epoch: int, start: int = 0) -> int | None:
        return self._reader.count(epoch, start)

    def position(self, epoch: int, batches: int) -> int:
        return self._reader.position(epoch, batches)

    def reseed(self, seed: int) -> None:
        self._common.reseed(seed)
        self._part.reseed(seed)
