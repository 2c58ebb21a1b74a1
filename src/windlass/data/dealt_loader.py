"""What the Trainer's loaders and those of user loops have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from windlass.core.types import State
from windlass.data.group import GroupSource


class DealtLoader(DataLoader[Any], GroupSource):
    """A `DataLoader` whose samples are dealt to ranks, and whose whole state is a position.

    Code of the user iterates it, and gets this rank's batches; a Trainer takes groups of them, from any position.
    Subclasses read, and know where they are; what follows from the two is here.
    """

    @property
    def epoch(self) -> int:
        """The pass that runs, or the coming one."""
        raise NotImplementedError

    @property
    def own_parts(self) -> bool:
        """Every rank reads a part of its own; positions of samples in it are not those of other ranks."""
        return False

    def __len__(self) -> int:
        """Batches of a pass; if the last row is short, a rank may have one less.

        Raises:
            TypeError: a stream, whose length nobody knows.
        """
        count = self.count(self.epoch)
        if count is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its loader has none")
        return count

    def count(self, epoch: int, start: int = 0) -> int | None:
        """Batches of a pass, from position `start` on; None for a stream without a length."""
        raise NotImplementedError

    def position_in(self, state: State) -> int:
        """Where a `state_dict` was taken, as `count` takes it."""
        raise NotImplementedError

    def groups_per_epoch(self, accumulation: int) -> int | None:
        """Updates of a pass; None for a stream without a length."""
        count = self.count(self.epoch)
        return None if count is None else -(-count // accumulation)

    def groups_left(self, position: State, accumulation: int) -> int | None:
        """Updates from `position` (a `state_dict`) to the end of its pass, in the sizes of this loader."""
        count = self.count(int(position["epoch"]), self.position_in(position))
        return None if count is None else -(-count // accumulation)

    def batches_in_step(self) -> Iterator[tuple[list[int] | None, Any]]:
        """A pass of this rank's batches, each with the positions of its samples in the dataset, equally many on all
        ranks: one that has run out gets a batch to fill in with, whose positions are None.
        """
        raise NotImplementedError

    def batches_with_ids(self) -> Iterator[tuple[list[int], Any]]:
        """The same without fillers."""
        return ((ids, batch) for ids, batch in self.batches_in_step() if ids is not None)
