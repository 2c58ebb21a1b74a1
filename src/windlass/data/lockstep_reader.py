"""Batches whose sizes only the rank that reads them knows: ranks exchange the sizes, two batches ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from windlass.core.errors import DataError
from windlass.core.trees import batch_size_of
from windlass.data.batch_reader import BatchReader, DealtBatch, PassRequest
from windlass.dist.gang import Gang
from windlass.dist.lockstep import Lockstep, Round

# Batches read before the one that is returned: one shows if another follows, and its sizes have been under way for a
# whole step when they are needed.
_AHEAD = 2


class _Read(NamedTuple):
    """The result of reading one batch; both are None at the end of the data."""

    dealt: DealtBatch | None
    error: Exception | None


# What a rank sends about a batch, besides its size.
_HAS, _HAS_NONE, _FAILED = 0.0, 1.0, 2.0


class LockstepReader:
    """Keeps ranks in step that have their own streams, or batches of unknown size.

    Ranks may end at different batches; those that end first get fillers until the last one is done. A few numbers are
    exchanged between hosts, so no device waits.

    Args:
        reader: this rank's batches.
        data_ranks: the ranks that go in step.
        own_parts: `reader` reads this rank's part of a stream that splits itself; positions include that.

    Raises:
        DataError: while iterating, on all ranks at the same batch: a rank has no batch at all, or failed to read one
            (the failing rank raises its own error).
    """

    def __init__(self, reader: BatchReader, data_ranks: Gang, *, own_parts: bool = False) -> None:
        self._reader, self._data_ranks, self._own_parts = reader, data_ranks, own_parts

    @property
    def unit(self) -> str:
        """Batches of every process; on another number of processes they hold other samples."""
        return f"batches of {self._data_ranks.size} processes{', each of its own part' if self._own_parts else ''}"

    @property
    def total_batch_size(self) -> int | None:
        """Unknown: batches may differ in size."""
        return None

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        epoch, start = wanted.epoch, wanted.start
        mine = self._reader.read(wanted.at(self._reader.position(epoch, start)))
        rounds = Lockstep[_Read](self._data_ranks)
        for _ in range(_AHEAD):
            self._begin(rounds, mine)
        done, stand_in = start, None
        current = self._checked(rounds)
        if current.going_on and not start:
            self._refuse_rank_without_any(current)
        while current.going_on:
            following = self._checked(rounds)
            self._begin(rounds, mine)
            # A rank that has ended repeats its last batch as a filler.
            done, stand_in = done + 1, current.item.dealt or stand_in or self._any(epoch)
            shares = tuple(map(int, current.sums[: self._data_ranks.size]))
            yield replace(
                stand_in,
                shares=shares,
                end=done,
                last=not following.going_on,
                ids=[],
                filler=not shares[self._data_ranks.rank],
            )
            current = following

    def count(self, epoch: int, start: int = 0) -> int | None:
        return self._reader.count(epoch, self._reader.position(epoch, start))

    def position(self, epoch: int, batches: int) -> int:
        return batches

    def reseed(self, seed: int) -> None:
        self._reader.reseed(seed)

    def _begin(self, rounds: Lockstep[_Read], mine: Iterator[DealtBatch]) -> None:
        """Read a batch and send its size; an error is raised when all ranks come to this batch."""
        read = _Read(None, None)
        try:
            read = _Read(next(mine, None), None)
        except Exception as failure:
            read = _Read(None, failure)
        size, state = 0.0, _FAILED if read.error else _HAS_NONE if read.dealt is None else _HAS
        if read.dealt is not None and not read.dealt.filler:
            # A batch without a tensor counts as one sample: a size of 0 marks fillers.
            size = float(batch_size_of(read.dealt.batch) or 1)
        rounds.begin(read, read.dealt is not None, [*self._placed(size), *self._placed(state)])

    def _placed(self, value: float) -> list[float]:
        """Zeros but for this rank's value: their sum is the list of all ranks' values."""
        return [value if rank == self._data_ranks.rank else 0.0 for rank in range(self._data_ranks.size)]

    def _checked(self, rounds: Lockstep[_Read]) -> Round[_Read]:
        """The next round, in which no rank failed."""
        ended = rounds.end()
        if ended.item.error is not None:
            raise ended.item.error
        failed = self._ranks_in(_FAILED, ended)
        if failed:
            raise DataError(f"ranks {failed} failed while reading this batch; their own errors say why.")
        return ended

    def _ranks_in(self, state: float, ended: Round[_Read]) -> list[int]:
        return [rank for rank, value in enumerate(ended.sums[self._data_ranks.size :]) if value == state]

    def _refuse_rank_without_any(self, first: Round[_Read]) -> None:
        """Raise on all ranks: a rank without a batch has no filler, so it would leave the others waiting."""
        idle = self._ranks_in(_HAS_NONE, first)
        if idle:
            raise DataError(
                f"ranks {idle} have no batch at all, while the others have: the data was split into fewer parts than "
                "there are processes. Split it further, or set dispatch_batches=True."
            )

    def _any(self, epoch: int) -> DealtBatch:
        """A batch of this rank to use as a filler, if it has none left after a resume."""
        dealt = next(self._reader.read(PassRequest(epoch)), None)
        if dealt is None:
            raise DataError(f"rank {self._data_ranks.rank} has no batch to read, while others have some.")
        return dealt
