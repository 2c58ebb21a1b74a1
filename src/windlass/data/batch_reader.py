"""What a prepared loader hands to a user's loop, and what the sources behind it have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from windlass.data.bookmark import Bookmark
from windlass.data.cut import share


@dataclass(slots=True)
class DealtBatch:
    """One batch of this rank, as a part of the batch that all ranks hold together.

    Attributes:
        batch: what the collator made, in host memory; where this rank has no sample left, some earlier or other
            sample, which must weigh nothing.
        shares: samples of each rank in this batch, in rank order.
        end: position of the pass once this batch is done, in the reader's unit.
        last: no batch follows in this pass, on any rank.
        ids: positions of this rank's samples in the dataset; empty if unknown, and in a filler.
        bookmark: by which a later pass can begin at `end` without reading what lies before; None if none is needed,
            or none is to be had.
    """

    batch: Any
    shares: tuple[int, ...]
    end: int
    last: bool
    ids: list[int] = field(default_factory=list)
    bookmark: Bookmark | None = None


class BatchReader(Protocol):
    """A source of dealt_batches. All ranks get the same number of them."""

    @property
    def unit(self) -> str:
        """What positions count ("samples", "batches")."""
        ...

    def accepts(self, unit: str) -> bool:
        """Whether a position that counts `unit` can be entered here."""
        ...

    @property
    def total_batch_size(self) -> int | None:
        """Samples that a whole batch of all ranks holds; None where that varies."""
        ...

    def read(self, epoch: int, start: int, bookmark: Bookmark | None = None) -> Iterator[DealtBatch]:
        """The batches of a pass from position `start` on; a bookmark of another place does nothing."""
        ...

    def count(self, epoch: int, start: int = 0) -> int | None:
        """Batches of a pass on each rank, from position `start` on; None if only reading tells."""
        ...

    def position(self, epoch: int, batches: int) -> int:
        """Where batch number `batches` of a pass begins."""
        ...

    def reseed(self, seed: int) -> None:
        """Go on with another seed."""
        ...


def shares_of(count: int, world: int) -> tuple[int, ...]:
    """How many of `count` samples each rank gets, when they are shared out evenly."""
    bounds = (share(count, world, rank) for rank in range(world))
    return tuple(high - low for low, high in bounds)
