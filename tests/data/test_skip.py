"""Passes that begin behind their first batches, and loaders that go back to where a state was taken."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches as peer_skip
from tests.data.cases import Augmented, Counted, Numbers, Stream
from tests.data.test_prepare_loader import Bucketed, prepare
from torch.utils.data import DataLoader, IterableDataset

from windlass.core.errors import ConfigError
from windlass.data.batch_reader import PassRequest
from windlass.data.choice import ReaderChoice
from windlass.data.dispatch import Dispatched
from windlass.data.skip import SkipBatchSampler, skip_first_batches
from windlass.dist.gang import Gang


def values(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("skipped", [0, 1, 3, 5, 9])
def test_a_pass_goes_on_behind_the_skipped_batches_without_reading_them(skipped: int) -> None:
    source = Numbers(18)
    loader = prepare(DataLoader(source, batch_size=2, shuffle=True), 2, 1)
    whole = values(prepare(DataLoader(Numbers(18), batch_size=2, shuffle=True), 2, 1))
    view = skip_first_batches(loader, skipped)
    assert len(view) == max(5 - skipped, 0)
    assert values(view) == whole[skipped:]
    assert source.reads == sum(map(len, whole[skipped:]))
    assert loader.iteration == view.iteration == 1, "the next pass over the loader itself is the next epoch"


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_and_batch_samplers_skip_too(workers: int) -> None:
    def stream() -> Any:
        return prepare(DataLoader(Stream(Numbers(11)), batch_size=2, num_workers=workers))

    assert values(skip_first_batches(stream(), 2)) == values(stream())[2:]
    with pytest.raises(ConfigError, match="num_batches=-1: must not be negative"):
        skip_first_batches(stream(), -1)
    bucketed = prepare(DataLoader(Numbers(11), batch_sampler=Bucketed()), 2, 0)
    assert values(skip_first_batches(bucketed, 1)) == [[4, 5], [10]]


@pytest.mark.parametrize("kind", ["map", "stream", "batches"])
def test_loaders_that_were_not_prepared_skip_as_accelerate_does(kind: str) -> None:
    def make() -> DataLoader[Any]:
        if kind == "stream":
            return DataLoader(Stream(Numbers(11)), batch_size=2)
        if kind == "batches":
            return DataLoader(Numbers(11), batch_sampler=Bucketed())
        return DataLoader(Numbers(11), batch_size=2, drop_last=True)

    mine, theirs = skip_first_batches(make(), 2), peer_skip(make(), 2)
    assert values(mine) == values(theirs)
    assert values(mine) == values(theirs), "every time"
    if kind != "stream":
        assert len(mine) == len(theirs)


def test_what_a_skipping_sampler_says_of_itself() -> None:
    sampler = SkipBatchSampler(DataLoader(Numbers(11), batch_size=2).batch_sampler, 4)
    assert (sampler.batch_size, sampler.total_length, len(sampler), list(sampler)) == (
        2,
        6,
        2,
        [[8, 9], [10]],
    )
    view = copy.copy(skip_first_batches(DataLoader(Stream(Numbers(3)), batch_size=1), 1))
    assert view.batch_size == 1


@pytest.mark.parametrize("kind", ["map", "stream", "batches"])
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_a_restored_loader_goes_on_where_the_state_was_taken(kind: str, taken: int) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        options = {"use_stateful_dataloader": True, "data_seed": seed}
        if kind == "stream":
            return prepare(DataLoader(Stream(Augmented(13)), batch_size=3), **options)
        if kind == "batches":
            return prepare(DataLoader(Augmented(11), batch_sampler=Bucketed()), **options)
        return prepare(DataLoader(Augmented(13), batch_size=3, shuffle=True), **options)

    def rest(batches: Any) -> list[Any]:
        return [batch["x"].tolist() for batch in batches]

    loader = make(1)
    rest(loader)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    other = make(2)
    other.load_state_dict(state)
    other.set_epoch(state["epoch"])
    following = rest(loader) if taken == 5 else rest(batches)
    assert rest(other) == following
    assert rest(other) == rest(loader), "and with the passes after that"


def test_another_world_and_batch_size_continue_the_same_order() -> None:
    def make(batch: int, world: int, rank: int) -> Any:
        loader = DataLoader(Numbers(40), batch_size=batch, shuffle=True)
        return prepare(loader, world, rank, use_stateful_dataloader=True)

    two = [make(3, 2, rank) for rank in range(2)]
    passes = [iter(loader) for loader in two]
    seen = [i for _ in range(3) for batches in passes for i in next(batches).tolist()]
    one = make(5, 1, 0)
    one.load_state_dict(two[0].state_dict())
    seen += [i for batch in one for i in batch.tolist()]
    assert seen == [i for batch in make(40, 1, 0) for i in batch.tolist()]


def test_skipping_counts_from_the_beginning_of_a_restored_pass() -> None:
    loader = prepare(DataLoader(Numbers(20), batch_size=2), use_stateful_dataloader=True)
    batches = iter(loader)
    next(batches), next(batches)
    other = prepare(DataLoader(Numbers(20), batch_size=2), use_stateful_dataloader=True)
    other.load_state_dict(loader.state_dict())
    assert values(skip_first_batches(other, 3))[0] == [6, 7]


def test_a_position_that_is_not_restored_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loader = prepare(DataLoader(Numbers(20), batch_size=2))
    next(iter(loader))
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(loader.state_dict())
    assert "use_stateful_dataloader=True" in caplog.text
    assert values(loader)[0] == [0, 1]


def test_a_stream_restored_behind_its_end_is_over() -> None:
    class Short(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(4))

    loader = prepare(DataLoader(Short(), batch_size=2), use_stateful_dataloader=True)
    loader.load_state_dict({**loader.state_dict(), "consumed": 10})
    assert values(loader) == []
    assert values(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [6, 3, 2])
@pytest.mark.parametrize("by", ["restoring", "skipping"])
def test_a_stream_with_a_state_is_entered_where_the_state_was_taken(
    workers: int, batch: int, by: str, said: pytest.LogCaptureFixture
) -> None:
    def make(size: int, dataset: Any) -> Any:
        loader = DataLoader(dataset, batch_size=size, num_workers=workers)
        return prepare(loader, use_stateful_dataloader=by == "restoring")

    first = make(6, Counted(40))
    batches = iter(first)
    seen = [i for _ in range(4) for i in next(batches).tolist()]
    dataset = Counted(40)
    other = make(batch, dataset)
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = other if by == "restoring" else skip_first_batches(other, 24 // batch)
    seen += [i for batch in rest for i in batch.tolist()]
    assert seen == [*range(40)]
    assert "again" not in said.text
    assert workers or dataset.given == 16
    assert [i for batch in other for i in batch.tolist()] == [*range(40)], "the next pass is a whole one"


def test_readers_on_top_of_a_stream_hand_its_bookmarks_on(said: pytest.LogCaptureFixture) -> None:
    def reader(dataset: Any) -> Any:
        items = DataLoader(dataset, batch_size=None)
        alone = ReaderChoice(items, seed=1, split=False, seedable=False, data_ranks=Gang()).reader(1, 0)
        return Dispatched(alone, Gang(), split=False)

    portions = list(reader(Counted(20)).read(PassRequest(0)))
    dataset = Counted(20)
    rest = reader(dataset).read(PassRequest(0, 7, portions[6].bookmark))
    assert [int(portion.batch) for portion in rest] == [*range(7, 20)]
    assert dataset.given == 13
    assert "again" not in said.text
