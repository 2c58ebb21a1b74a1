from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import (
    Augmented,
    Numbers,
    SometimesAugmented,
    Stream,
    as_list,
    epoch_over_ranks,
    train_loader,
)

from windlass.core.errors import DataError

SIZES = {
    "count": st.integers(1, 60),
    "micro": st.integers(1, 4),
    "accumulation": st.integers(1, 3),
    "world": st.integers(1, 4),
    "seed": st.integers(0, 5),
}


def loaders(count: int, micro: int, accumulation: int, world: int, **plan: Any) -> list[Any]:
    return [train_loader(Numbers(count), micro, accumulation, world, rank, **plan) for rank in range(world)]


def flat(updates: list[list[int]]) -> list[int]:
    return [i for update in updates for i in update]


@given(**SIZES)
def test_each_epoch_is_the_whole_dataset_in_an_order_that_no_world_changes(
    count: int, micro: int, accumulation: int, world: int, seed: int
) -> None:
    many = loaders(count, micro, accumulation, world, seed=seed)
    (single,) = loaders(count, micro * accumulation * world, 1, 1, seed=seed)
    for _ in range(2):
        updates = epoch_over_ranks(many, accumulation)
        assert sorted(flat(updates)) == list(range(count))
        assert updates == epoch_over_ranks([single], 1)


@given(**SIZES, data=st.data())
def test_a_resumed_run_continues_exactly_in_another_world_at_the_same_global_batch(
    count: int, micro: int, accumulation: int, world: int, seed: int, data: st.DataObject
) -> None:
    before = loaders(count, micro, accumulation, world, seed=seed)
    expected = epoch_over_ranks(before, accumulation) + epoch_over_ranks(before, accumulation)
    stop = data.draw(st.integers(0, len(expected) - 1), label="updates before the stop")
    stopped = loaders(count, micro, accumulation, world, seed=seed)
    states = [_state_after(loader, stop) for loader in stopped]
    assert all(state == states[0] for state in states)
    size = micro * accumulation * world
    other_world = data.draw(st.sampled_from([w for w in range(1, 5) if size % w == 0]), label="new world")
    other_micro = data.draw(
        st.sampled_from([m for m in range(1, 5) if size // other_world % m == 0]), label="new micro"
    )
    resumed = loaders(count, other_micro, size // other_world // other_micro, other_world, seed=seed + 7)
    for loader in resumed:
        loader.load_state_dict(states[0])
    after: list[list[int]] = []
    while len(after) < len(expected) - stop:
        after += epoch_over_ranks(resumed, size // other_world // other_micro)
    assert after == expected[stop:]


def _state_after(loader: Any, updates: int) -> Any:
    """The loader's state once it has given that many groups, epoch after epoch."""
    while updates > 0:
        for group in loader.groups():
            assert loader.state_dict() == group.position
            updates -= 1
            if not updates:
                break
    return loader.state_dict()


@given(**SIZES)
def test_group_facts(count: int, micro: int, accumulation: int, world: int, seed: int) -> None:
    all_groups = [list(loader.groups()) for loader in loaders(count, micro, accumulation, world, seed=seed)]
    for rank_groups in all_groups:
        assert [g.last_in_epoch for g in rank_groups] == [False] * (len(rank_groups) - 1) + [True]
        assert sum(g.dealt_samples for g in rank_groups) == count
        assert len(rank_groups) == loaders(count, micro, accumulation, world)[0].groups_per_epoch(
            accumulation
        )
        assert all(g.batches for g in rank_groups), "a filler group holds a batch too"
        assert all(g.filler == (sum(map(len, g.ids)) == 0) for g in rank_groups)
        assert all(g.batches == g.ids for g in rank_groups if not g.filler), "sample i is i"
    idle = sum(g.filler for groups in all_groups for g in groups)
    tail = count % (micro * accumulation * world)
    assert idle == (max(0, world - tail) if tail else 0)


def test_epochs_and_seeds_give_other_orders() -> None:
    loader = train_loader(Numbers(100), 100)
    orders = [next(iter(loader.groups())).ids for _ in range(3)]
    orders.append(next(iter(train_loader(Numbers(100), 100, seed=1).groups())).ids)
    assert len({str(order) for order in orders}) == 4


def test_a_resume_reads_the_remaining_samples_and_no_other() -> None:
    loader = train_loader(Numbers(50), 4, 2)
    state = next(iter(loader.groups())).position
    dataset = Numbers(50)
    resumed = train_loader(dataset, 4, 2)
    resumed.load_state_dict(state)
    list(resumed.groups())
    assert dataset.reads == 50 - 8


@pytest.mark.parametrize("kind", [Augmented, SometimesAugmented])
@pytest.mark.parametrize(
    "options", [{}, {"persistent_workers": True}, {"in_order": False, "prefetch_factor": 4}]
)
def test_workers_give_the_same_bits(kind: type[Numbers], options: dict[str, Any]) -> None:
    here = train_loader(kind(23), 2, 2, collate=None)
    there = train_loader(kind(23), 2, 2, collate=None, workers=2, **options)
    for _ in range(2):
        for one, other in zip(here.groups(), there.groups(), strict=True):
            assert one.ids == other.ids
            assert all(torch.equal(a["x"], b["x"]) for a, b in zip(one.batches, other.batches, strict=True))


def test_a_step_that_draws_from_python_gets_the_same_numbers_from_any_number_of_workers() -> None:
    drawn = []
    for workers in (0, 1):
        random.seed(3)
        loader = train_loader(Numbers(16), 2, 2, workers=workers)
        groups = loader.groups()
        position = next(groups).position
        between = [random.random() for _ in groups]
        loader.load_state_dict(position)
        drawn.append(between + [random.random() for _ in loader.groups()])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("kind", [Augmented, SometimesAugmented])
def test_a_samples_randomness_is_its_own(kind: type[Numbers], untouched_generators: None) -> None:
    """Whatever was read before it, and however it is batched: the same bits; other bits in another epoch."""
    large = {
        int(x[0]): x for g in train_loader(kind(23), 23, collate=None).groups() for x in g.batches[0]["x"]
    }
    loader = train_loader(kind(23), 2, collate=None)
    small = {int(x[0]): x for g in loader.groups() for x in g.batches[0]["x"]}
    again = {int(x[0]): x for g in loader.groups() for x in g.batches[0]["x"]}
    assert all(torch.equal(large[i], small[i]) for i in range(23))
    assert not any(torch.equal(again[i], small[i]) for i in range(23) if kind is Augmented or i % 7 == 3)


def test_a_dataset_that_seeds_the_generators_itself_disturbs_nobody(untouched_generators: None) -> None:
    class Seeds(Numbers):
        def __getitem__(self, index: int) -> float:
            torch.manual_seed(5)
            np.random.seed(5)
            return torch.rand(()).item()

    assert len(list(train_loader(Seeds(9), 2))) == 5


def test_a_collator_that_draws_is_seeded_by_its_first_sample() -> None:
    def noisy(samples: list[int]) -> tuple[int, float]:
        return samples[0], torch.rand(()).item()

    loader = train_loader(Numbers(12), 2, order="sequential", collate=noisy)
    first = [g.batches[0] for g in loader.groups()]
    resumed = train_loader(Numbers(12), 2, order="sequential", collate=noisy)
    resumed.load_state_dict({"seed": 42, "epoch": 0, "consumed": 6})
    assert [g.batches[0] for g in resumed.groups()] == first[3:]
    assert len({noise for _, noise in first}) == 6


def test_plain_iteration_is_a_pass_that_moves_nothing() -> None:
    loader = train_loader(Numbers(10), 3)
    groups = loader.groups()
    first = next(groups)
    state = loader.state_dict()
    passes = [[i for batch in loader for i in batch] for _ in range(2)]
    assert passes[0][:3] == first.ids[0]
    assert sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    assert len(list(loader)) == len(loader) == 4
    assert loader.state_dict() == state
    assert first.ids[0] + [i for g in groups for i in g.ids[0]] == passes[0]


def test_a_look_at_the_data_does_not_disturb_trainings_workers() -> None:
    loader = train_loader(Numbers(40), 2, workers=1, persistent_workers=True)
    seen: list[int] = []
    for number, group in enumerate(loader.groups()):
        seen += group.ids[0]
        assert group.batches == group.ids
        if number == 3:
            assert sorted(i for batch in loader for i in batch) == list(range(40))
    assert sorted(seen) == list(range(40))


def test_what_user_code_reads_from_a_dataloader() -> None:
    dataset = Numbers(21)
    loader = train_loader(dataset, 4, world=2)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert loader.dataset is dataset
    assert (loader.batch_size, loader.total_batch_size, loader.collate_fn) == (4, 8, as_list)
    assert (len(loader), loader.num_samples) == (3, 21)
    assert sorted(loader.sampler) == list(range(21))


@pytest.mark.parametrize(
    "samples",
    [[(torch.ones(2), 1)] * 5, [torch.ones(2)] * 5, [(torch.ones(2), torch.ones(()))] * 5, [1.0] * 5],
)
def test_samples_that_are_no_dicts_come_as_pytorch_collates_them(samples: list[Any]) -> None:
    ours = list(train_loader(samples, 2, order="sequential", collate=None))
    theirs = list(torch.utils.data.DataLoader(samples, batch_size=2))
    assert len(ours) == len(theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_batched_reads_are_used_whether_anything_draws_or_not() -> None:
    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(len(indices))
            return [index + 100 for index in indices]

    asked: list[int] = []
    batches = list(train_loader(Batched(20), 2))
    assert sorted(i for batch in batches for i in batch) == list(range(100, 120))
    assert asked == [1, 1, *[2] * 9], "the first batch is read one by one, to learn whether the samples draw"


def test_drop_last_leaves_the_incomplete_row_out() -> None:
    both = [train_loader(Numbers(21), 4, 1, 2, rank, drop_last=True) for rank in range(2)]
    updates = epoch_over_ranks(both, 1)
    assert [len(update) for update in updates] == [8, 8]
    assert len(both[0]) == both[0].groups_per_epoch(1) == 2


def test_set_epoch_keeps_a_restored_position() -> None:
    loader = train_loader(Numbers(10), 2)
    loader.load_state_dict({"seed": 42, "epoch": 3, "consumed": 4, "length": 10})
    loader.set_epoch(3)
    assert loader.state_dict()["consumed"] == 4
    loader.set_epoch(4)
    assert loader.state_dict() == {"seed": 42, "epoch": 4, "consumed": 0, "length": 10}


def test_a_dataset_that_hears_of_epochs_is_told() -> None:
    class Hearing(Numbers):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    loader = train_loader(Hearing(4), 2)
    list(loader.groups())
    list(loader.groups())
    assert loader.dataset.epochs == [0, 1]


def test_dropping_a_last_batch_of_another_size_is_no_other_dataset(said: pytest.LogCaptureFixture) -> None:
    """As of a run that is resumed on another number of processes."""
    before = train_loader(Numbers(10), 4, drop_last=True)
    position = next(before.groups()).position
    train_loader(Numbers(10), 3, drop_last=True).load_state_dict(position)
    assert not said.text
    train_loader(Numbers(11), 3, drop_last=True).load_state_dict(position)
    assert "the dataset has 11 samples, and had 10 when" in said.text


def test_a_changed_dataset_or_seed_is_said(said: pytest.LogCaptureFixture) -> None:
    loader = train_loader(Numbers(10), 2)
    loader.load_state_dict({"seed": 1, "epoch": 0, "consumed": 4, "length": 12})
    assert "seed 1, not with 42" in said.text
    assert "has 10 samples, and had 12" in said.text
    loader, position = train_loader(Numbers(10), 2), {"seed": 42, "epoch": 0, "consumed": 4}
    for state in (position, position | {"length": 10}, position | {"length": None, "consumed": 0}):
        said.clear()
        loader.load_state_dict(state)
        assert not said.text
    loader.load_state_dict({**position, "length": None})
    assert "is rows with numbers, and was a stream when the checkpoint was written" in said.text
    train_loader(Stream(Numbers(10)), 2).load_state_dict({**position, "length": 10})
    assert "is a stream, and was rows with numbers" in said.text


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Numbers(0), {}, "is empty.*Check the file"),
        ([], {}, "is empty"),
        ([], {"order": "group_by_length"}, "is empty"),
        (Numbers(3), {"drop_last": True}, "dataloader_drop_last=False or a batch size of at most 3"),
        (Numbers(3), {"drop_last": True, "world": 4}, "dataloader_drop_last=False or at most 3 processes"),
        ({"input_ids": [[1], [2]]}, {}, "mapping of whole columns.*list of dicts"),
        (5, {}, "neither __getitem__ nor __iter__"),
    ],
)
def test_what_cannot_be_read_is_refused(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        train_loader(dataset, 4, **options)


def test_an_error_names_the_sample() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 7:
                raise KeyError("text")
            return index

    with pytest.raises(KeyError) as caught:
        list(train_loader(Broken(9), 2, order="sequential"))
    assert "reading sample 7 of Broken" in caught.value.__notes__[0]
