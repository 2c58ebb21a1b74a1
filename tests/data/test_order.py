from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import Augmented, Numbers, Stream, epoch_over_ranks, train_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from windlass.config.loop_options import DataLoaderConfiguration
from windlass.core.errors import ConfigError, DataError
from windlass.data.order import LengthGroupedOrder, RandomOrder, SamplerOrder, sample_lengths
from windlass.data.prepare_loader import prepare_loader
from windlass.dist.gang import Gang

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=80)


class Texts(Numbers):
    """Sample i has the i-th of the given lengths."""

    def __init__(self, lengths: list[int], column: bool = False) -> None:
        super().__init__(len(lengths))
        self.lengths, self.column = lengths, column

    def __getitem__(self, index: int) -> dict[str, object]:
        self.reads += 1
        n = self.lengths[index]
        return {"length": n} if self.column else {"input_ids": [1] * n}


def test_the_random_order_is_pinned() -> None:
    """A checkpoint outlives versions: the order of (seed, epoch) may never change."""
    assert RandomOrder(10, seed=42).of(0).tolist() == [2, 8, 4, 1, 6, 9, 5, 7, 3, 0]


@given(lengths=LENGTHS, batch=st.integers(1, 8), epoch=st.integers(0, 3))
def test_length_grouping_sorts_stretches_and_begins_with_the_longest(
    lengths: list[int], batch: int, epoch: int
) -> None:
    order = LengthGroupedOrder(np.array(lengths), batch, seed=1).of(epoch)
    assert sorted(order) == list(range(len(lengths)))
    assert lengths[order[0]] == max(lengths)
    stretch = max(1, min(len(lengths) // (batch * 4), 50)) * batch
    moved = {0, *range(0, len(lengths), stretch)}  # the longest changed places with a stretch's first
    for start in range(0, len(lengths), stretch):
        inside = [lengths[i] for n, i in enumerate(order[start : start + stretch], start) if n not in moved]
        assert inside == sorted(inside, reverse=True)


def test_length_grouping_pads_less_than_random_order() -> None:
    lengths = [random.Random(i).randint(1, 100) for i in range(400)]

    def padding(order: str) -> int:
        batches = train_loader(Texts(lengths), 8, order=order)
        return sum(max(map(len, ids)) * len(ids) - sum(map(len, ids)) for ids in _tokens(batches))

    assert padding("group_by_length") < padding("random") / 3


def _tokens(batches: object) -> Iterator[list[list[int]]]:
    for batch in batches:  # type: ignore[attr-defined]
        yield [sample["input_ids"] for sample in batch]


@pytest.mark.parametrize("order", ["random", "group_by_length", "batch_rebalance"])
@pytest.mark.parametrize("micro", [1, 4])
def test_an_epoch_goes_on_without_repeats_in_updates_of_another_size(order: str, micro: int) -> None:
    """As after a run that is resumed on another number of processes, or with another batch size."""
    dataset = Texts([number * 7 % 23 + 1 for number in range(60)])
    before = train_loader(dataset, 2, order=order)
    groups = [group for _, group in zip(range(7), before.groups(), strict=False)]
    after = train_loader(dataset, micro, order=order)
    after.load_state_dict(json.loads(json.dumps(groups[-1].position)))
    seen = [number for group in (*groups, *after.groups()) for ids in group.ids for number in ids]
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize("order", ["group_by_length", "batch_rebalance"])
@given(lengths=LENGTHS, micro=st.integers(1, 3), accumulation=st.integers(1, 3), world=st.integers(1, 3))
def test_orders_by_length_give_every_sample_once(
    order: str, lengths: list[int], micro: int, accumulation: int, world: int
) -> None:
    ranks = [train_loader(Texts(lengths), micro, accumulation, world, r, order=order) for r in range(world)]
    (single,) = [train_loader(Texts(lengths), micro * accumulation * world, 1, order=order)]
    updates = epoch_over_ranks(ranks, accumulation)
    assert sorted(i for update in updates for i in update) == list(range(len(lengths)))
    assert [sorted(u) for u in updates] == [sorted(u) for u in epoch_over_ranks([single], 1)]
    assert sorted(i for r in ranks for ids, _ in r.batches_with_ids() for i in ids) == list(
        range(len(lengths))
    )


def test_lengths_come_from_the_column_or_the_tokens_and_are_read_once() -> None:
    for dataset in (Texts([3, 9, 4], column=True), Texts([3, 9, 4])):
        train_loader(dataset, 1, order="group_by_length")
        loader = train_loader(dataset, 1, order="group_by_length")
        assert dataset.reads == 3
        assert next(iter(loader.groups())).ids == [[1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_equal_lengths_are_warned_of_once_in_a_job(
    rank: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    train_loader(Texts([4] * 6), 2, order="group_by_length")
    assert ("all 6 samples have the length 4" in said.text) == (rank == 0)


def test_samples_without_a_length_are_refused() -> None:
    with pytest.raises(DataError, match=r"columns \['x'\].*length_column_name"):
        train_loader([{"x": 1}], 1, order="group_by_length")


@pytest.mark.parametrize("order", ["group_by_length", "batch_rebalance"])
def test_a_stream_cannot_be_ordered(order: str) -> None:
    with pytest.raises(ConfigError, match="train_sampling_strategy"):
        train_loader(Stream(Numbers(4)), 1, order=order)


def test_a_users_sampler_decides_the_order_in_any_world() -> None:
    sampler = SubsetRandomSampler([4, 8, 1, 5, 9])
    both = [train_loader(Numbers(10), 1, 1, 2, rank, sampler=sampler) for rank in range(2)]
    one, two = epoch_over_ranks(both, 1), epoch_over_ranks(both, 1)
    flat = [[i for update in epoch for i in update] for epoch in (one, two)]
    assert sorted(flat[0]) == sorted(flat[1]) == [1, 4, 5, 8, 9]
    assert flat[0] != flat[1]


def test_a_users_seeded_sampler_keeps_its_first_order_and_resumes() -> None:
    def sampler() -> RandomSampler:
        return RandomSampler(range(12), generator=torch.Generator().manual_seed(3))

    loader = train_loader(Numbers(12), 3, sampler=sampler())
    epochs = [[i for g in loader.groups() for i in g.ids[0]] for _ in range(3)]
    assert epochs[0] == list(sampler())
    resumed = train_loader(Numbers(12), 3, sampler=sampler())
    resumed.load_state_dict({"seed": 42, "epoch": 2, "consumed": 3})
    assert [i for g in resumed.groups() for i in g.ids[0]] == epochs[2][3:]
    assert len({str(epoch) for epoch in epochs}) == 3


def test_a_sampler_is_told_the_epoch(untouched_generators: None) -> None:
    sampler = DistributedSampler(range(6), num_replicas=1, rank=0, shuffle=True)
    order = SamplerOrder(sampler, seed=0)
    assert order.of(1).tolist() != order.of(0).tolist()
    assert sampler.epoch == 0


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (DistributedSampler(range(6), num_replicas=2, rank=0), "DistributedSampler"),
        (BatchSampler(SequentialSampler(range(6)), 2, False), "yields batches"),
        (["a", "b"], r"yields 'a' \(str\)"),
    ],
)
def test_samplers_that_do_not_give_positions_are_refused(sampler: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        train_loader(Numbers(6), 2, sampler=sampler)


def test_lengths_of_hugging_face_sets_survive_the_removal_of_columns() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"length": [1, 9, 3], "input_ids": [[1]] * 3})
    bare = whole.remove_columns(["length"])
    loader = train_loader(bare, 1, order="group_by_length", measured=whole)
    assert next(iter(loader.groups())).ids == [[1]]
    tokens = datasets.Dataset.from_dict({"input_ids": [[1], [1, 2, 3], [1, 2]]})
    assert next(iter(train_loader(tokens, 1, order="group_by_length").groups())).ids == [[1]]


def test_lengths_are_measured_again_if_the_dataset_has_grown() -> None:
    texts = Texts([3, 1, 2])
    assert sample_lengths(texts).tolist() == [3, 1, 2]
    texts.lengths.append(5)
    texts.count += 1
    assert sample_lengths(texts).tolist() == [3, 1, 2, 5]


def test_the_value_that_is_no_position_is_named() -> None:
    with pytest.raises(DataError, match=r"yields 'one' \(str\)"):
        SamplerOrder([0, "one"], 0).of(0)


def test_a_sampler_with_a_length_may_have_any_number_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.data.order._ENDLESS", 5)
    assert SamplerOrder(range(5), 0).of(0).tolist() == [0, 1, 2, 3, 4]
    assert SamplerOrder(range(6), 0).of(0).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="did not end"):
        SamplerOrder(itertools.count(), 0).of(0)


@given(
    positions=st.lists(st.integers(0, 4), min_size=1, max_size=14),
    micro=st.integers(1, 3),
    world=st.integers(1, 3),
    batched=st.booleans(),
    data=st.data(),
)
def test_a_sample_that_comes_again_is_augmented_anew_and_alike_in_any_world(
    positions: list[int], micro: int, world: int, batched: bool, data: st.DataObject
) -> None:
    def rows(ranks: int, size: int) -> Iterator[list[list[float]]]:
        """For each batch of all ranks, its samples in the order of the epoch."""
        loaders = []
        for rank in range(ranks):
            if batched:
                cut = BatchSampler(positions, size, drop_last=False)
                loader = DataLoader(Augmented(5), batch_sampler=cut)
                options = DataLoaderConfiguration(data_seed=42)
                loaders.append(
                    prepare_loader(
                        loader, ranks=ranks, rank=rank, device=None, options=options, data_ranks=Gang()
                    )
                )
            else:
                loaders.append(
                    train_loader(Augmented(5), size, 1, ranks, rank, sampler=positions, collate=None)
                )
        for groups in zip(*(loader.groups(1) for loader in loaders), strict=True):
            yield [row for g in groups if not g.filler for row in g.batches[0]["x"].tolist()]

    found = [row for rows_of_all in rows(world, micro) for row in rows_of_all]
    assert [row[0] for row in found] == positions
    assert len(set(map(tuple, found))) == len(positions)
    alone = next(train_loader(Augmented(5), 5, order="sequential", collate=None).groups())
    first = {int(row[0]): row for row in reversed(found)}
    assert all(row == alone.batches[0]["x"][index].tolist() for index, row in first.items())
    assert found == [row for rows_of_all in rows(1, 1) for row in rows_of_all]
    start = data.draw(st.integers(0, len(positions) - 1), label="samples before the resumption")
    resumed = train_loader(Augmented(5), 2, sampler=positions, collate=None)
    resumed.load_state_dict({"seed": 42, "epoch": 0, "consumed": start})
    assert [row for g in resumed.groups() for row in g.batches[0]["x"].tolist()] == found[start:]
