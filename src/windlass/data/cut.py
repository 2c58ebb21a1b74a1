"""How the samples of one update are dealt to ranks and micro-batches.

An update's samples are laid out in *rows* of `micro * world` samples; row j holds micro-batch j of every
rank, rank r's being the r-th run of `micro` samples. Only the last row of an epoch can be short: it is dealt
evenly, so that every rank has work if it can.
"""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """One update's share of this rank.

    Attributes:
        batches: sample positions of each micro-batch of this rank; for a filler, one position that belongs to
            another rank.
        samples: number of samples of the update over all ranks.
        end: samples of the epoch consumed over all ranks once this update is done.
        last: no update follows in this epoch.
        filler: this rank has no sample in this update.
    """

    batches: list[list[int]]
    samples: int
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


def cut_rows(ids: list[int], micro: int, world: int, rank: int) -> list[list[int]]:
    """This rank's micro-batches of an update that holds the samples `ids`; a rank without any gets an empty list."""
    row = micro * world
    whole = len(ids) - len(ids) % row
    batches = [ids[start : start + micro] for start in range(rank * micro, whole, row)]
    if whole < len(ids):
        low, high = share(len(ids) - whole, world, rank)
        if high > low:
            batches.append(ids[whole + low : whole + high])
    return batches
