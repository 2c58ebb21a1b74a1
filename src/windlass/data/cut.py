"""How samples are divided between ranks: in contiguous runs whose sizes differ by one at most, larger ones first."""

from __future__ import annotations


def share(count: int, world: int, rank: int) -> tuple[int, int]:
    """The half-open range of `count` items that `rank` of `world` gets."""
    base, extra = divmod(count, world)
    low = rank * base + min(rank, extra)
    return low, low + base + (rank < extra)


def shares_of(count: int, world: int) -> tuple[int, ...]:
    """How many of `count` items each rank gets."""
    base, extra = divmod(count, world)
    return tuple(base + (rank < extra) for rank in range(world))


def dealt(ids: list[int], world: int) -> list[list[int]]:
    """The runs of `ids` that the ranks get."""
    if world == 1:
        return [ids]
    return [ids[low:high] for low, high in (share(len(ids), world, rank) for rank in range(world))]
