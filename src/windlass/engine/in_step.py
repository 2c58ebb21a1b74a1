"""Equal numbers of evaluation batches on all ranks, for models whose every forward needs all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from windlass.core.errors import DataError
from windlass.dist.gang import Gang

Placed = tuple[list[int] | None, Any]
"""(dataset positions, batch); positions are empty where unknown, and None for a batch that only fills in."""


def in_step(batches: Iterable[Placed], gang: Gang) -> Iterator[Placed]:
    """This rank's batches, and its last one again (as a filler) while other ranks still have some. Collective.

    Costs one exchange between hosts for each batch: loaders of our own know the ends beforehand and do without.

    Raises:
        DataError: this rank has nothing to fill in with.
    """
    remaining, last = iter(batches), None
    while True:
        placed = next(remaining, None)
        if not gang.start_sum([float(placed is not None)]).wait()[0]:
            return
        if placed is not None:
            last = copy.copy(placed[1])  # a step may take labels out of it
            yield placed
        elif last is None:
            raise DataError(
                f"rank {gang.rank} got no evaluation batch from the script's own loader, and a sharded model needs "
                "every rank in each forward: give every process at least one batch, or evaluate in fewer processes"
            )
        else:
            yield None, copy.copy(last)
