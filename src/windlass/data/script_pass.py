"""A pass of a script's own loop over a Trainer's evaluation loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from windlass.core.trees import send_to_device
from windlass.data.batch_reader import DealtBatch
from windlass.dist.gang import Gang


class Follower(Protocol):
    """Is called at the begin and end of a pass, and before each batch of it: the accelerator, which accumulates up to
    the end of a pass and knows the samples of its current batch.
    """

    def begin(self, loader: Any) -> None: ...

    def turn_to(self, loader: Any) -> None: ...

    def end(self, loader: Any) -> None: ...


@dataclass(slots=True)
class ScriptPass:
    """The pass under way, as the accelerator sees it.

    Attributes:
        batch_size: samples of a whole batch on one rank.
        total_batch_size: samples of a whole batch over all ranks.
        num_samples: those of the pass over all ranks; None if unknown.
        current: the batch that the script has.
    """

    batch_size: int
    total_batch_size: int
    num_samples: int | None
    rank: int
    current: DealtBatch | None = None

    @property
    def samples_here(self) -> int:
        return self.current.shares[self.rank] if self.current else 0

    @property
    def samples_everywhere(self) -> int:
        return sum(self.current.shares) if self.current else 0

    @property
    def is_filler(self) -> bool:
        return bool(self.current and self.current.filler)

    @property
    def end_of_dataloader(self) -> bool:
        return bool(self.current and self.current.last)

    @property
    def remainder(self) -> int:
        samples = self.samples_everywhere if self.end_of_dataloader else self.num_samples
        return -1 if samples is None else samples % self.total_batch_size


@dataclass(frozen=True, slots=True)
class ForScripts:
    """How a script's own loop gets the batches of a Trainer: on `device`, and equally many on every rank, so that the
    loop may exchange values with each batch. `follower` knows the samples of the current one.
    """

    follower: Follower
    device: torch.device
    data_ranks: Gang

    def batches(self, rows: Iterator[DealtBatch], watched: ScriptPass) -> Iterator[Any]:
        self.follower.begin(watched)
        # A loop that is left early closes this generator.
        try:
            for row in rows:
                watched.current = row
                yield send_to_device(row.batch, self.device)
        finally:
            self.follower.end(watched)
