"""The unit in which the engine takes data: all micro-batches of one update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windlass.core.types import State


@dataclass(slots=True)
class Group:
    """All micro-batches of one update on this rank, fetched before its first backward.

    Attributes:
        batches: collated micro-batches, in host memory; never empty.
        ids: for each micro-batch, the positions of its samples in the dataset (empty lists where unknown).
        samples: number of samples of this update over *all* ranks (0 where unknown).
        epoch: the pass over the data it belongs to, from 0.
        last_in_epoch: no further group follows in this epoch.
        filler: this rank ran out of samples; `batches` repeats earlier data and must weigh nothing.
        position: the loader's state once this group is consumed; what a checkpoint after this update stores.
    """

    batches: list[Any]
    ids: list[list[int]]
    samples: int
    epoch: int
    last_in_epoch: bool
    filler: bool = False
    position: State = field(default_factory=dict)
