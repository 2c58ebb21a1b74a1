from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import Augmented, Numbers, Stream, as_list

from windlass.config.plan import BatchPlan, DataPlan
from windlass.data.loader import Loader
from windlass.data.prepare import build_eval_loader


def eval_loader(
    dataset: Any, size: int, world: int = 1, rank: int = 0, collate: Any = as_list, **plan: Any
) -> Loader:
    batch = BatchPlan(micro=99, accumulation=7, ranks=world, rank=rank, eval=size)
    return build_eval_loader(dataset, plan=DataPlan(**plan), batch=batch, collate=collate)


@pytest.mark.parametrize("kind", [Numbers, lambda count: Stream(Numbers(count))])
@given(count=st.integers(1, 40), size=st.integers(1, 5), world=st.integers(1, 4))
def test_every_sample_exactly_once_over_the_ranks(kind: Any, count: int, size: int, world: int) -> None:
    loaders = [eval_loader(kind(count), size, world, rank, drop_last=True) for rank in range(world)]
    pairs = [pair for loader in loaders for pair in loader.batches_with_ids()]
    assert sorted(i for ids, _ in pairs for i in ids) == list(range(count))
    assert all(ids == batch and 0 < len(ids) <= size for ids, batch in pairs)
    assert [batch for loader in loaders for batch in loader] == [batch for _, batch in pairs]


def test_one_process_reads_in_order() -> None:
    assert list(eval_loader(Numbers(7), 3, order="random")) == [[0, 1, 2], [3, 4, 5], [6]]


def test_every_pass_is_the_same_random_transforms_included(untouched_generators: None) -> None:
    loader = eval_loader(Augmented(7), 3, collate=None)
    one, two = [torch.cat([batch["x"] for batch in loader]) for _ in range(2)]
    assert torch.equal(one, two)


def test_an_empty_set_has_no_batch() -> None:
    assert list(eval_loader(Numbers(0), 3)) == []


def test_hugging_face_sets() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": list(range(7)), "label": [0, 1] * 3 + [0]}
    loader = eval_loader(datasets.Dataset.from_dict(rows).with_format("torch"), 4, collate=None)
    batches = list(loader)
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6]]
    assert batches[1]["labels"].tolist() == [0, 1, 0]
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=3)
    assert [len(batch["x"]) for batch in eval_loader(stream, 4, collate=None, workers=2)] == [4, 3]
