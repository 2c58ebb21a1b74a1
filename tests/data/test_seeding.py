from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.data.cases import Numbers, train_loader
from torch.utils.data import DataLoader

from windlass.config.plan import BatchPlan, DataPlan
from windlass.data.batch_reader import PassRequest
from windlass.data.choice import PassthroughReader
from windlass.data.foreign_loader import ForeignLoader
from windlass.data.prepare import build_eval_loader

PLAN = BatchPlan(micro=2, accumulation=1, ranks=1, rank=0, eval=2)


class Staged(Numbers):
    """Its samples are those of its epoch, as of a dataset that becomes harder from one to the next."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.epoch


class Iterates(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def own(dataset: Any) -> Iterator[Any]:
    loader = train_loader(dataset, 2, order="sequential")
    loader.set_epoch(1)
    return (group.batches[0] for group in loader.groups())


def foreign(dataset: Any) -> Iterator[Any]:
    loader = ForeignLoader(DataLoader(dataset, batch_size=2), PLAN)
    loader.set_epoch(1)
    return (group.batches[0] for group in loader.groups())


def passed_on(dataset: Any) -> Iterator[Any]:
    return (dealt.batch for dealt in PassthroughReader(Iterates(dataset, batch_size=2)).read(PassRequest(1)))


@pytest.mark.parametrize("batches", [own, foreign, passed_on])
def test_a_pass_keeps_its_epoch_when_its_data_is_evaluated(batches: Callable[[Any], Iterator[Any]]) -> None:
    def read(evaluate: bool) -> list[Any]:
        dataset, found = Staged(8), []
        evaluation = build_eval_loader(dataset, plan=DataPlan(), batch=PLAN, collate=torch.tensor)
        for batch in batches(dataset):
            found.append([int(value) for value in batch])
            if evaluate:
                assert torch.cat(list(evaluation)).tolist() == list(range(8))
        return found

    assert read(evaluate=True) == read(evaluate=False) == [[100, 101], [102, 103], [104, 105], [106, 107]]
