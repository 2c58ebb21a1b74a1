"""The engine's unit of data, all micro-batches of one update, and the protocol of its sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from windlass.core.types import State


@dataclass(slots=True)
class Group:
    """All micro-batches of one update on this rank, fetched before its first backward.

    Attributes:
        batches: collated micro-batches, in host memory; never empty.
        ids: for each micro-batch, the positions of its samples in the dataset (empty lists if unknown).
        samples: number of samples of this update over *all* ranks (0 if unknown).
        epoch: the pass over the data it belongs to, from 0.
        last_in_epoch: no further group follows in this epoch.
        filler: this rank has no samples left; `batches` repeats other data and must have zero weight.
        position: the loader's state once this group is consumed; what a checkpoint after this update stores.
    """

    batches: list[Any]
    ids: list[list[int]]
    samples: int
    epoch: int
    last_in_epoch: bool
    filler: bool = False
    position: State = field(default_factory=dict)


class GroupSource(Protocol):
    """Groups of this rank from any position: a loader that deals samples, or a user's own in `data.foreign_loader`."""

    def groups(self, accumulation: int) -> Iterator[Group]:
        """The groups from the current position to the end of its pass; the next call continues with the next pass."""
        ...

    def groups_per_epoch(self, accumulation: int) -> int | None:
        """Updates of a pass; None if only reading shows it."""
        ...

    def groups_left(self, position: State, accumulation: int) -> int | None:
        """Updates from `position` (a `state_dict`) to the end of its pass, in the sizes of this run."""
        ...

    def position_after(self, epoch: int, updates: int, accumulation: int) -> State:
        """The position after so many updates of `epoch`, for a run that another program began."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, unless a restored position already lies in it."""
        ...

    def state_dict(self) -> State:
        """Where the group after the last one taken begins."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go to where `state` was taken."""
        ...
