"""How samples are divided between ranks: in contiguous runs whose sizes differ by one at most, larger ones first."""

from __future__ import annotations


def share(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """The half-open range of `count` items that `rank` of `ranks` gets."""
    base, extra = divmod(count, ranks)
    low = rank * base + min(rank, extra)
    return low, low + base + (rank < extra)


def shares_of(count: int, ranks: int) -> tuple[int, ...]:
    """How many of `count` items each rank gets."""
    base, extra = divmod(count, ranks)
    return tuple(base + (rank < extra) for rank in range(ranks))


def dealt(ids: list[int], ranks: int) -> list[list[int]]:
    """The runs of `ids` that the ranks get."""
    if ranks == 1:
        return [ids]
    return [ids[low:high] for low, high in (share(len(ids), ranks, rank) for rank in range(ranks))]
