"""Portions whose sizes only the rank that reads them knows: ranks tell each other, two batches ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from windlass.core.errors import DataError
from windlass.core.trees import batch_size_of
from windlass.data.bookmark import Bookmark
from windlass.data.portion import Portion, Reader
from windlass.dist.gang import Gang, Pending

# Batches read before the one that is handed out: one shows whether another follows, and by the time its sizes are
# needed, they have been under way for a whole step.
_AHEAD = 2


class _Sent(NamedTuple):
    portion: Portion | None
    error: Exception | None
    told: Pending


# What a rank tells of a batch, besides its size.
_HAS, _HAS_NONE, _FAILED = 0.0, 1.0, 2.0


class Counted:
    """Makes ranks with their own streams, or with batches of unknown size, go in step.

    Ranks may end at different batches; those that end first get fillers until the last one is done. What is exchanged
    are a few numbers between hosts: no device waits.

    Args:
        reader: this rank's batches.
        rank: this rank's place in the shares that `reader` gives.
        gang: the ranks that go in step.
        own_parts: `reader` turned out to read a part that its stream cut: positions say so.

    Raises:
        DataError: while iterating, on all ranks at the same batch: a rank has no batch at all, or failed to read one
            (the failing rank raises its own error).
    """

    def __init__(self, reader: Reader, rank: int, gang: Gang, *, own_parts: bool = False) -> None:
        self._reader, self._rank, self._gang, self._own_parts = reader, rank, gang, own_parts

    @property
    def unit(self) -> str:
        """Batches of every process; on another number of processes they hold other samples."""
        return f"batches of {self._gang.size} processes{', each of its own part' if self._own_parts else ''}"

    def accepts(self, unit: str) -> bool:
        return unit == self.unit

    @property
    def total_batch_size(self) -> int | None:
        """Unknown: batches may differ in size."""
        return None

    def portions(self, epoch: int, start: int, bookmark: Bookmark | None = None) -> Iterator[Portion]:
        mine = self._reader.portions(epoch, self._reader.position(epoch, start), bookmark)
        under_way = deque(self._send(mine) for _ in range(_AHEAD))
        done, stand_in = start, None
        try:
            shares = self._shares(under_way[0])
            if not start:
                self._refuse_rank_without_any(under_way[0], shares)
            while sum(shares):
                current = under_way.popleft()
                portion = current.portion or stand_in or self._any(epoch, shares)
                following = self._shares(under_way[0])
                under_way.append(self._send(mine))
                done, stand_in = done + 1, portion
                last = not sum(following)
                yield Portion(portion.batch, shares, done, last, portion.bookmark)
                shares = following
        finally:
            for sent in under_way:  # every rank has begun these exchanges, so every rank can end them
                sent.told.wait()

    def batches(self, epoch: int) -> int | None:
        return self._reader.batches(epoch)

    def position(self, epoch: int, batches: int) -> int:
        return batches

    def reseed(self, seed: int) -> None:
        self._reader.reseed(seed)

    def _send(self, mine: Iterator[Portion]) -> _Sent:
        portion, error = None, None
        try:
            portion = next(mine, None)
        except (
            Exception
        ) as failure:  # raised when the others come to this batch too, or they would wait for this rank
            error = failure
        size, state = 0.0, _FAILED if error else _HAS_NONE if portion is None else _HAS
        if portion is not None and portion.shares[self._rank]:
            size = float(batch_size_of(portion.batch) or 1)
        return _Sent(portion, error, self._gang.start_sum([*self._placed(size), *self._placed(state)]))

    def _placed(self, value: float) -> list[float]:
        """Zeros but for this rank's value: their sum is the list of all ranks' values."""
        return [value if rank == self._gang.rank else 0.0 for rank in range(self._gang.size)]

    def _shares(self, sent: _Sent) -> tuple[int, ...]:
        sizes, states = self._told(sent)
        if sent.error is not None:
            raise sent.error
        failed = [rank for rank, state in enumerate(states) if state == _FAILED]
        if failed:
            raise DataError(f"ranks {failed} failed while reading this batch; their own errors say why.")
        return tuple(map(int, sizes))

    def _told(self, sent: _Sent) -> tuple[list[float], list[float]]:
        told, world = sent.told.wait(), self._gang.size
        return told[:world], told[world:]

    def _refuse_rank_without_any(self, first: _Sent, shares: tuple[int, ...]) -> None:
        """On all ranks alike: one that has nothing to run along with would leave the others waiting."""
        idle = [rank for rank, state in enumerate(self._told(first)[1]) if state == _HAS_NONE]
        if sum(shares) and idle:
            raise DataError(
                f"ranks {idle} have no batch at all, while the others have: the data was split into fewer parts than "
                "there are processes. Split it further, or set dispatch_batches=True."
            )

    def _any(self, epoch: int, shares: tuple[int, ...]) -> Portion:
        """Some batch of this rank's to run along with, where it has none left after a resume."""
        portion = next(self._reader.portions(epoch, 0), None)
        if portion is None:
            raise DataError(
                f"rank {self._gang.rank} has no batch to read, while others have: {list(shares)} samples."
            )
        return portion
