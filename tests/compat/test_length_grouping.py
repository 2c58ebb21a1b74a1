from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import trainer_pt_utils as reference

from windlass.compat import length_grouping as ours
from windlass.core.errors import DataError

LENGTHS = [(7 * i) % 23 + 1 for i in range(50)]
SAMPLES = [{"input_ids": [0] * n, "words": [0] * (n + i % 3)} for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("options", [{}, {"mega_batch_mult": 3}, {"mega_batch_mult": 1}])
@pytest.mark.parametrize("batch", [1, 4, 60])
def test_the_order_is_that_of_the_reference(batch: int, options: dict[str, Any]) -> None:
    found, wanted = (
        module.get_length_grouped_indices(
            LENGTHS, batch, generator=torch.Generator().manual_seed(3), **options
        )
        for module in (ours, reference)
    )
    assert found == wanted
    assert LENGTHS[found[0]] == max(LENGTHS)


@pytest.mark.parametrize(
    "given",
    [
        {"lengths": LENGTHS},
        {"lengths": torch.tensor(LENGTHS)},
        {"dataset": SAMPLES},
        {"dataset": SAMPLES, "model_input_name": "words"},
    ],
)
def test_samplers_give_the_orders_of_the_reference(given: dict[str, Any]) -> None:
    found, wanted = (
        list(module.LengthGroupedSampler(4, generator=torch.Generator().manual_seed(1), **given))
        for module in (ours, reference)
    )
    assert found == wanted
    assert len(ours.LengthGroupedSampler(4, **given)) == len(LENGTHS)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_parts_of_processes_are_those_of_the_reference(ranks: int, drop_last: bool) -> None:
    for rank in range(ranks):
        samplers: list[Any] = [
            module.DistributedLengthGroupedSampler(
                4, num_replicas=ranks, rank=rank, seed=2, drop_last=drop_last, lengths=LENGTHS
            )
            for module in (ours, reference)
        ]
        for epoch in (0, 4):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            assert list(samplers[0]) == list(samplers[1])
            assert len(samplers[0]) == len(samplers[1])


def test_more_processes_than_samples_get_one_each() -> None:
    sampler = ours.DistributedLengthGroupedSampler
    parts = [list(sampler(1, num_replicas=5, rank=rank, lengths=[3, 7])) for rank in range(5)]
    assert [len(part) for part in parts] == [1] * 5


@pytest.mark.parametrize("given", [{}, {"dataset": [{"text": "x"}]}])
def test_samples_that_cannot_be_measured_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"length"):
        ours.LengthGroupedSampler(4, **given)


def test_an_empty_dataset_has_an_empty_order() -> None:
    assert list(ours.LengthGroupedSampler(2, lengths=[])) == []
    assert list(ours.DistributedLengthGroupedSampler(2, num_replicas=2, rank=0, lengths=[])) == []
