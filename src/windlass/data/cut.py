"""How samples are shared out to ranks, and what one rank reads of them at a time."""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """One rank's share of some rows, which it reads as a whole: of one row in a loop, of an update's in a Trainer.

    Attributes:
        batches: sample positions of each micro-batch of this rank; for a filler, one position that belongs to
            another rank.
        shares: number of samples of each rank.
        end: position of the pass once these rows are done.
        last: no row follows in this pass.
        filler: this rank has no sample in these rows.
    """

    batches: list[list[int]]
    shares: tuple[int, ...]
    end: int
    last: bool
    filler: bool


def share(count: int, world: int, rank: int) -> tuple[int, int]:
    """The half-open range of `count` things that `rank` of `world` gets; sizes differ by one at most, larger
    ones first.
    """
    base, extra = divmod(count, world)
    low = rank * base + min(rank, extra)
    return low, low + base + (rank < extra)


def dealt(ids: list[int], world: int) -> list[list[int]]:
    """`ids` shared out to all ranks, in runs."""
    if world == 1:
        return [ids]
    bounds = (share(len(ids), world, rank) for rank in range(world))
    return [ids[low:high] for low, high in bounds]
