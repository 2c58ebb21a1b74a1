from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import Augmented, Numbers, Stream, epoch_over_ranks, train_loader
from torch.utils.data import DataLoader

from windlass import Accelerator
from windlass.core.errors import DataError

SIZES = {
    "count": st.integers(1, 40),
    "micro": st.integers(1, 4),
    "accumulation": st.integers(1, 3),
    "world": st.integers(1, 4),
}


def streams(count: int, micro: int, accumulation: int, world: int, **plan: Any) -> list[Any]:
    return [
        train_loader(Stream(Numbers(count)), micro, accumulation, world, rank, **plan)
        for rank in range(world)
    ]


@given(**SIZES)
def test_each_epoch_is_the_stream_in_its_order(count: int, micro: int, accumulation: int, world: int) -> None:
    ranks = streams(count, micro, accumulation, world)
    for _ in range(2):
        updates = epoch_over_ranks(ranks, accumulation)
        assert [i for update in updates for i in update] == list(range(count))
        size = micro * accumulation * world
        assert [len(update) for update in updates[:-1]] == [size] * (len(updates) - 1)


@given(**SIZES, data=st.data())
def test_a_resumed_run_continues_exactly(
    count: int, micro: int, accumulation: int, world: int, data: st.DataObject
) -> None:
    size = micro * accumulation * world
    stop = data.draw(st.integers(0, (count - 1) // size), label="updates before the stop")
    other = data.draw(st.sampled_from([w for w in range(1, 5) if size % w == 0]), label="new world")
    resumed = streams(count, 1, size // other, other)
    for loader in resumed:
        loader.load_state_dict({"seed": 42, "epoch": 0, "consumed": stop * size})
    rest = epoch_over_ranks(resumed, size // other)
    assert [i for update in rest for i in update] == list(range(stop * size, count))
    assert all(loader.state_dict()["epoch"] == 1 for loader in resumed)


@given(**SIZES)
def test_group_facts(count: int, micro: int, accumulation: int, world: int) -> None:
    for loader in streams(count, micro, accumulation, world):
        groups = list(loader.groups())
        assert [g.last_in_epoch for g in groups] == [False] * (len(groups) - 1) + [True]
        assert sum(g.dealt_samples for g in groups) == count
        assert all(g.batches and g.filler == (not any(g.ids)) for g in groups)
        assert all(g.batches == g.ids for g in groups if not g.filler)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"in_order": False}])
def test_workers_give_the_same_bits(options: dict[str, Any]) -> None:
    here = train_loader(Stream(Augmented(23)), 2, 2, 2, 1, collate=None)
    there = train_loader(Stream(Augmented(23)), 2, 2, 2, 1, collate=None, workers=2, **options)
    for _ in range(2):
        for one, other in zip(here.groups(), there.groups(), strict=True):
            assert (one.ids, one.filler, one.position) == (other.ids, other.filler, other.position)
            assert all(torch.equal(a["x"], b["x"]) for a, b in zip(one.batches, other.batches, strict=True))


def test_lasting_workers_of_private_passes_follow_another_seed() -> None:
    loader = train_loader(Stream(Augmented(6)), 2, collate=None, workers=1, persistent_workers=True)
    list(loader)
    loader.load_state_dict({"seed": 7, "epoch": 0, "consumed": 0})
    fresh = train_loader(Stream(Augmented(6)), 2, collate=None, seed=7)
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(loader, fresh, strict=True))


def test_a_copy_starts_workers_of_its_own() -> None:
    loader = train_loader(Stream(Numbers(6)), 2, workers=1, persistent_workers=True)
    begun = loader.groups()
    first, evaluated = next(begun), list(loader)
    copied = copy.deepcopy(loader)
    assert list(copied) == evaluated
    assert [group.ids for group in copied.groups()] == [group.ids for group in begun] != first.ids


def test_randomness_belongs_to_the_sample(untouched_generators: None) -> None:
    whole = [
        x for g in train_loader(Stream(Augmented(11)), 11, collate=None).groups() for x in g.batches[0]["x"]
    ]
    resumed = train_loader(Stream(Augmented(11)), 2, collate=None)
    resumed.load_state_dict({"seed": 42, "epoch": 0, "consumed": 4})
    rest = [x for g in resumed.groups() for x in g.batches[0]["x"]]
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], rest, strict=True))


def test_reading_again_is_said(said: pytest.LogCaptureFixture) -> None:
    (loader,) = streams(9, 2, 1, 1)
    loader.load_state_dict({"seed": 42, "epoch": 0, "consumed": 4})
    list(loader.groups())
    assert said.text.count("reading 4 samples of the stream again") == 1


def test_a_stream_has_no_length_unless_it_says_one() -> None:
    (loader,) = streams(9, 2, 1, 1)
    assert loader.num_samples is None
    assert loader.groups_per_epoch(1) is None
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    assert loader.state_dict()["length"] is None

    class Sized(Stream):
        def __len__(self) -> int:
            return 9

    assert train_loader(Sized(Numbers(9)), 2).groups_per_epoch(2) == 3


def test_drop_last_leaves_the_incomplete_row_out() -> None:
    updates = epoch_over_ranks(streams(21, 4, 1, 2, drop_last=True), 1)
    assert [len(update) for update in updates] == [8, 8]


def test_a_generator_serves_one_epoch_and_then_says_so() -> None:
    loader = train_loader((i for i in range(3)), 2)
    assert [g.ids for g in loader.groups()] == [[[0, 1]], [[2]]]
    with pytest.raises(DataError, match=r"epoch 1.*read once only"):
        list(loader.groups())


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.source)


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [(0, {}, r"Sized\) is empty\."), (3, {"drop_last": True}, "shorter than one batch")],
)
def test_a_stream_whose_length_shows_that_it_is_empty_is_refused_as_such(
    count: int, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        next(train_loader(Sized(Numbers(count)), 4, **options).groups())


@pytest.mark.parametrize(("consumed", "words"), [(0, "is empty"), (4, "not the same stream")])
def test_a_stream_that_gives_nothing_is_refused(consumed: int, words: str) -> None:
    loader = train_loader(Stream(Numbers(0 if not consumed else 4)), 2)
    loader.load_state_dict({"seed": 42, "epoch": 0, "consumed": consumed})
    with pytest.raises(DataError, match=words):
        list(loader.groups())


def test_a_stream_split_by_node_is_read_as_it_is() -> None:
    stream = Stream(Numbers(4))
    stream._distributed = object()
    assert not train_loader(stream, 1).own_parts, "one process reads all of it"
    loader = train_loader(stream, 1, world=2)
    assert loader.own_parts
    assert [group.ids for group in loader.groups(1)] == [[[0]], [[1]], [[2]], [[3]]]


def test_a_position_in_parts_says_so() -> None:
    stream = Stream(Numbers(8))
    stream._distributed = object()
    loader = train_loader(stream, 1, world=2)
    groups = loader.groups(1)
    next(groups), next(groups)
    state = loader.state_dict()
    assert (state["parts"], state["consumed"]) == (2, 2)
    alone = train_loader(Stream(Numbers(8)), 1)
    alone.load_state_dict(state)
    assert alone.consumed == 4, "two samples of each of two parts"
    wider = train_loader(stream, 1, world=4)
    wider.load_state_dict(state)
    assert wider.consumed == 1, "of each of four parts"


def test_a_sampler_for_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match="cannot order an iterable"):
        train_loader(Stream(Numbers(4)), 1, sampler=[0, 1])


def test_an_error_names_the_sample() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise ValueError("bad line")
            return index

    with pytest.raises(ValueError, match="bad line") as caught:
        list(train_loader(Stream(Broken(9)), 2).groups())
    assert "reading sample 5" in caught.value.__notes__[0]


def test_a_chain_of_streams_has_no_length_if_its_parts_have_none() -> None:
    chain = Stream(Numbers(3)) + Stream(Numbers(4))
    loader = train_loader(chain, 2)
    assert [group.batches for group in loader.groups()] == [[[0, 1]], [[2, 0]], [[1, 2]], [[3]]]
    assert loader.num_samples is None
    prepared: Any = Accelerator(cpu=True).prepare(DataLoader(chain, batch_size=2))
    assert [batch.tolist() for batch in prepared] == [[0, 1], [2, 0], [1, 2], [3]]
    assert prepared.num_samples is None
