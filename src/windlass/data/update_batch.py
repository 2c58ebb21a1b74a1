"""The data of one update, and the protocol of its sources."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from windlass.core.types import State


@dataclass(slots=True)
class UpdateBatch:
    """All micro-batches of one update on this rank (a group), fetched before its first backward.

    A source sets what is known of its data. `engine.feed.Feed` counts it, and adds the sums over all ranks.

    Attributes:
        batches: collated micro-batches, in host memory; never empty.
        ids: for each micro-batch, the positions of its samples in the dataset (empty lists if unknown).
        dealt_samples: number of samples of all ranks that Windlass deals; 0 if each rank has data of its own.
        epoch: the pass over the data it belongs to, from 0.
        last_in_epoch: this rank has no further data in this epoch.
        filler: this rank has no samples left; `batches` repeats other data and must have zero weight.
        position: the loader's state once this group is consumed; what a checkpoint after this update stores.
        targets, samples: numbers of each micro-batch of this rank, on the host.
        denominator: targets of all ranks. Without any, an update is skipped, because momentum and weight decay would
            change weights without data. The weights of `LossTerms` are not part of this count.
        given_count: what a script has counted in place of the denominator, for losses that divide by
            `num_items_in_batch`; None: it counts nothing.
        total_samples, tokens, positions: sums over all ranks: samples, tokens as the configuration counts them, and
            positions with padding.
        flops: a script's own estimate of the floating-point operations, summed over all ranks; None if it has none.
        last: no rank has a further update in this epoch.
        signals: signals of all ranks when this was fetched, summed; the same on all ranks.
    """

    batches: list[Any]
    ids: list[list[int]]
    dealt_samples: int
    epoch: int
    last_in_epoch: bool
    filler: bool = False
    position: State = field(default_factory=dict)
    targets: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    denominator: float = 0.0
    given_count: float | None = None
    total_samples: float = 0.0
    tokens: float = 0.0
    positions: float = 0.0
    flops: float | None = None
    last: bool = False
    signals: Sequence[float] = ()


class GroupSource(Protocol):
    """Groups of this rank from any position: a loader that deals samples, or a user's own in `data.foreign_loader`."""

    def groups(self, accumulation: int) -> Iterator[UpdateBatch]:
        """The groups, of `accumulation` micro-batches each, from the current position to the end of its pass; the next
        call continues with the next pass.
        """

    def groups_per_epoch(self, accumulation: int) -> int | None:
        """Updates of a pass, of `accumulation` micro-batches each; None if only reading shows it."""

    def groups_left(self, position: State, accumulation: int) -> int | None:
        """Updates, of `accumulation` micro-batches each, from `position` (a `state_dict`) to the end of its pass."""

    def position_after(self, epoch: int, updates: int, accumulation: int) -> State:
        """The position after so many `updates` of `epoch`, of `accumulation` micro-batches each, for a run that another
        program began.
        """

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, unless a restored position already lies in it."""

    def state_dict(self) -> State:
        """Where the group after the last one taken begins."""

    def load_state_dict(self, state: State) -> None:
        """Go to where `state` was taken."""


def fill_up(group: UpdateBatch, micro_batches: int) -> None:
    """Repeat the first micro-batch without weight until there are as many as `micro_batches`."""
    missing = micro_batches - len(group.batches)
    if missing > 0:
        # Copies: a training step may take labels out of its batch.
        group.batches = [*group.batches, *(copy.copy(group.batches[0]) for _ in range(missing))]
        group.ids = [*group.ids, *([] for _ in range(missing))]
        group.targets = [*group.targets, *[0.0] * missing]
        group.samples = [*group.samples, *[0] * missing]
