"""Datasets and plans that the data tests share."""

from __future__ import annotations

import random
import signal
import sys
from typing import Any

import numpy as np
import pytest
import torch

from windlass.config.plan import BatchPlan, DataPlan
from windlass.data.loader import Loader
from windlass.data.prepare import build_train_loader
from windlass.data.update_batch import UpdateBatch


class Numbers:
    """Sample i is i; counts what is read."""

    def __init__(self, count: int) -> None:
        self.count, self.reads = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Augmented(Numbers):
    """Sample i with draws of every default generator."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draws = [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.randn(()).item(),
        ]
        return {"x": torch.tensor([index, *draws], dtype=torch.float64)}


class SometimesAugmented(Augmented):
    """Only every seventh sample draws, and none of the first batch's."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index % 7 == 3:
            return super().__getitem__(index)
        return {"x": torch.full((6,), float(index), dtype=torch.float64)}


class Stream(torch.utils.data.IterableDataset[Any]):
    """A dataset's samples, one after the other; would shard if it saw that it runs in a worker."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        step = 1 if info is None else info.num_workers
        return (self.source[i] for i in range(0 if info is None else info.id, len(self.source), step))


class Counted(torch.utils.data.IterableDataset[Any]):
    """Numbers from a stream with a state of its own; counts what it gives."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.given = count, 0, 0

    def __iter__(self) -> Any:
        start, self.at = self.at, 0
        for i in range(start, self.count):
            self.given += 1
            self.at = i + 1
            yield i
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def of_worker(name: str) -> Any:
    """What torch's function that runs in a data worker, and has called this, has under a name."""
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back or pytest.fail(f"torch's worker has nothing of the name {name}")
    return frame.f_locals[name]


def end_in_a_minute() -> None:
    """Where it would wait for ever: the exception of pytest's limit would be lost where objects are freed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)


def as_list(samples: list[Any]) -> list[Any]:
    """A collator that leaves the samples as they are."""
    return samples


def train_loader(
    dataset: Any, micro: int = 1, accumulation: int = 1, world: int = 1, rank: int = 0, **plan: Any
) -> Loader:
    collate, sampler = plan.pop("collate", as_list), plan.pop("sampler", None)
    measured = plan.pop("measured", None)
    batch = BatchPlan(micro, accumulation, world, rank, eval=micro)
    return build_train_loader(
        dataset, plan=DataPlan(**plan), batch=batch, collate=collate, sampler=sampler, measured=measured
    )


def in_global_order(per_rank: list[UpdateBatch]) -> list[int]:
    """The samples of one update over all ranks, in the order of the epoch."""
    rows = max(len(group.ids) for group in per_rank)
    return [i for j in range(rows) for group in per_rank if j < len(group.ids) for i in group.ids[j]]


def epoch_over_ranks(loaders: list[Loader], accumulation: int) -> list[list[int]]:
    """For each update of the next epoch (from its current position): the ids over all ranks, in global order."""
    updates = [list(loader.groups(accumulation)) for loader in loaders]
    assert len({len(groups) for groups in updates}) == 1, "ranks must agree on the number of updates"
    return [in_global_order(list(groups)) for groups in zip(*updates, strict=True)]
