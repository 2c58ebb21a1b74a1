"""Portions whose sizes only the rank that reads them knows: ranks tell each other, two batches ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from windlass.core.errors import DataError
from windlass.data.nested import batch_size_of
from windlass.data.portion import Portion, Reader
from windlass.dist.gang import Gang, Pending

# Batches read before the one that is handed out: one shows whether another follows, and by the time its sizes are
# needed, they have been under way for a whole step.
_AHEAD = 2


class _Sent(NamedTuple):
    portion: Portion | None
    sizes: Pending


class Counted:
    """Makes ranks with their own streams, or with batches of unknown size, go in step.

    Ranks may end at different batches; those that end first get fillers until the last one is done. What is exchanged
    are a few numbers between hosts: no device waits.

    Args:
        reader: this rank's batches.
        rank: this rank's place in the shares that `reader` gives.
        gang: the ranks that go in step.

    Raises:
        DataError: while iterating, on all ranks: a rank has no batch at all.
    """

    unit = "batches"

    def __init__(self, reader: Reader, rank: int, gang: Gang) -> None:
        self._reader, self._rank, self._gang = reader, rank, gang

    @property
    def total_batch_size(self) -> int | None:
        """Unknown: batches may differ in size."""
        return None

    def portions(self, epoch: int, start: int) -> Iterator[Portion]:
        mine = self._reader.portions(epoch, self._reader.position(epoch, start))
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
                yield Portion(portion.batch, shares, done, last=not sum(following))
                shares = following
        finally:
            for sent in under_way:  # every rank has begun these exchanges, so every rank can end them
                sent.sizes.wait()

    def batches(self, epoch: int) -> int | None:
        return self._reader.batches(epoch)

    def position(self, epoch: int, batches: int) -> int:
        return batches

    def reseed(self, seed: int) -> None:
        self._reader.reseed(seed)

    def _send(self, mine: Iterator[Portion]) -> _Sent:
        portion = next(mine, None)
        sizes = [0.0] * self._gang.size + [float(portion is None)]
        if portion is not None and portion.shares[self._rank]:
            sizes[self._gang.rank] = batch_size_of(portion.batch) or 1
        return _Sent(portion, self._gang.start_sum(sizes))

    def _shares(self, sent: _Sent) -> tuple[int, ...]:
        return tuple(int(size) for size in sent.sizes.wait()[:-1])

    def _refuse_rank_without_any(self, first: _Sent, shares: tuple[int, ...]) -> None:
        """On all ranks alike: one that has nothing to run along with would leave the others waiting."""
        if sum(shares) and first.sizes.wait()[-1]:
            idle = [rank for rank, size in enumerate(shares) if not size]
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
