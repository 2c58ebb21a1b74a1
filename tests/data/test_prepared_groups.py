"""A prepared loader as a Trainer takes it: groups of the same batches, resumed at any of them."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import Augmented, Numbers, Stream, in_global_order
from tests.data.test_prepare_loader import prepare
from tests.data.test_skip import Bucketed
from torch.utils.data import DataLoader

from windlass.config.plan import BatchPlan
from windlass.core.errors import DataError
from windlass.data.foreign_loader import ForeignLoader


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 5),
    world=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    stream=st.booleans(),
)
def test_groups_hold_every_sample_once_in_the_order_of_the_batches(
    count: int, batch: int, world: int, accumulation: int, stream: bool
) -> None:
    def make(rank: int) -> Any:
        data: Any = Stream(Numbers(count)) if stream else Numbers(count)
        return prepare(DataLoader(data, batch_size=batch, shuffle=not stream), world, rank)

    batches = [list(make(rank).batches_in_step()) for rank in range(world)]
    loaders = [make(rank) for rank in range(world)]
    per_rank = [list(loader.groups(accumulation)) for loader in loaders]
    assert len({len(groups) for groups in per_rank}) == 1
    for loader, groups, plain in zip(loaders, per_rank, batches, strict=True):
        assert [i for group in groups if not group.filler for ids in group.ids for i in ids] == [
            i for ids, _ in plain if ids is not None for i in ids
        ]
        assert all(
            b.tolist() == i for g in groups if not g.filler for b, i in zip(g.batches, g.ids, strict=True)
        )
        assert [group.last_in_epoch for group in groups] == [False] * (len(groups) - 1) + [True]
        assert loader.iteration == 1, "the next call goes on with the next pass"
        assert all(len(group.batches) == 1 and group.ids == [[]] for group in groups if group.filler)
    seen = [
        in_global_order([group for group in update if not group.filler])
        for update in zip(*per_rank, strict=True)
    ]
    assert [len(update) for update in seen] == [group.dealt_samples for group in per_rank[0]]
    assert sorted(i for update in seen for i in update) == list(range(count))


@pytest.mark.parametrize("kind", ["map", "stream", "batches"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_position_is_continued_exactly(kind: str, accumulation: int) -> None:
    def make(seed: int) -> Any:
        options = {"use_stateful_dataloader": True, "data_seed": seed}
        if kind == "stream":
            return prepare(DataLoader(Stream(Augmented(13)), batch_size=3), **options)
        if kind == "batches":
            return prepare(DataLoader(Augmented(11), batch_sampler=Bucketed()), **options)
        return prepare(DataLoader(Augmented(13), batch_size=3, shuffle=True), **options)

    def values(groups: Any) -> list[Any]:
        return [[batch["x"].tolist() for batch in group.batches] for group in groups]

    loader = make(1)
    whole = [*loader.groups(accumulation), *loader.groups(accumulation)]
    for taken, group in enumerate(whole[:-1], start=1):
        resumed = make(2)
        position = json.loads(json.dumps(group.position))
        resumed.load_state_dict(position)
        rest = values(resumed.groups(accumulation))
        assert rest == values(whole[taken : taken + len(rest)])
        if kind != "stream":
            assert resumed.groups_left(position, accumulation) == len(rest)
            updates = taken % (len(whole) // 2)
            after = resumed.position_after(position["epoch"], updates, accumulation)
            assert {**after, "bookmark": None} == {**position, "bookmark": None}


def test_reading_groups_leaves_the_default_generators_alone() -> None:
    loader = prepare(DataLoader(Augmented(9), batch_size=2))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    list(loader.groups(2))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]


def test_a_checkpoint_of_a_run_that_read_the_loader_itself_goes_on_behind_as_many_batches() -> None:
    own = DataLoader(Numbers(20), batch_size=2)
    foreign = ForeignLoader(own, BatchPlan(2, 2, 1, 0, eval=2))
    position = next(iter(foreign.groups(2))).position
    loader = prepare(own, use_stateful_dataloader=True)
    assert loader.groups_left(position, 2) == 4
    loader.load_state_dict(position)
    assert next(iter(loader.groups(2))).ids == [[4, 5], [6, 7]]
    loader.load_state_dict(position)
    list(loader.groups(2))
    assert sum(map(len, loader)) == 20, "the next pass is a whole one"


def test_a_loader_that_gives_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="gave no batch"):
        list(prepare(DataLoader(Numbers(1), batch_size=2, drop_last=True)).groups(1))
