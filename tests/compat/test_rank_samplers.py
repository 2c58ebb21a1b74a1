"""Samplers that give each process its share, compared with accelerate's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import accelerate.data_loader as their_loaders
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import trainer_pt_utils as reference

from windlass.compat import loaders as ours

LENGTHS = [(13 * i) % 97 + 3 for i in range(70)]


class Drawn(IterableDataset[int]):
    """Numbers from a generator that the shard seeds."""

    def __init__(self, length: int) -> None:
        self.length, self.generator = length, torch.Generator()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randint(1000, (self.length,), generator=self.generator).tolist()


class Counted(Drawn):
    """A stream that takes epochs itself."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(self.epoch, self.epoch + self.length)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 7, 24, 30])
def test_shards_of_positions_are_those_of_the_reference(count: int, drop_last: bool) -> None:
    for rank in range(3):
        found, wanted = (
            module.ShardSampler(range(count), 4, drop_last, 3, rank)  # type: ignore[arg-type]
            for module in (ours, reference)
        )
        assert list(found) == list(wanted)
        assert len(found) == len(wanted)


@pytest.mark.parametrize("stream", [Drawn, Counted])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 7, 24, 30])
def test_shards_of_streams_are_those_of_the_reference(count: int, drop_last: bool, stream: Any) -> None:
    for rank in range(3):
        found, wanted = (
            module.IterableDatasetShard(stream(count), 4, drop_last, 3, rank, seed=5)
            for module in (ours, reference)
        )
        for epoch in (0, 2):
            for shard in (found, wanted):
                shard.set_epoch(epoch)
                assert shard.num_examples == (count if epoch else 0), "of the iteration before"
            samples = zip(found, wanted, strict=True)
            assert all((a, found.num_examples) == (b, wanted.num_examples) for a, b in samples)
            assert found.num_examples == wanted.num_examples == count
        assert len(found) == len(wanted)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [8, 11, 17])
def test_looped_parts_are_those_of_the_reference(count: int, shuffle: bool) -> None:
    for rank in range(3):
        found, wanted = (
            module.DistributedSamplerWithLoop(
                range(count), batch_size=4, num_replicas=3, rank=rank, shuffle=shuffle
            )
            for module in (ours, reference)
        )
        assert list(found) == list(wanted)


def test_samplers_of_loaders_are_found_as_by_the_references() -> None:
    data = list(range(8))
    order = RandomSampler(data)
    batches = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    loaders = [
        DataLoader(data, batch_size=2),
        DataLoader(data, sampler=order),
        DataLoader(data, batch_sampler=batches),
        DataLoader(data, sampler=batches, batch_size=None),
    ]
    for loader in loaders:
        assert ours.get_dataloader_sampler(loader) is reference.get_dataloader_sampler(loader)
        assert ours.get_sampler(loader) is their_loaders.get_sampler(loader)
    assert ours.get_dataloader_sampler(object()) is None


def _cost(sampler: Any, batch: list[int]) -> float:
    longest = max(LENGTHS[i] for i in batch)
    return float(len(batch) * longest + 0.001 * len(batch) * longest**2)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rebalanced_updates_have_the_samples_of_the_reference_and_no_dearer_batch(
    shuffle: bool, drop_last: bool
) -> None:
    def per_rank(module: Any) -> list[list[list[int]]]:
        samplers = [
            module.BatchRebalanceSampler(LENGTHS, 16, 2, 2, shuffle, seed=1, rank=rank, drop_last=drop_last)
            for rank in range(2)
        ]
        for sampler in samplers:
            sampler.set_epoch(3)
        batches = [list(sampler) for sampler in samplers]
        assert [len(one) for one in batches] == [len(sampler) for sampler in samplers]
        return batches

    found, wanted = per_rank(ours), per_rank(reference)
    assert len(found[0]) == len(wanted[0])
    for start in range(0, len(found[0]), 2):
        mine = [batch for rank in found for batch in rank[start : start + 2]]
        theirs = [batch for rank in wanted for batch in rank[start : start + 2]]
        assert sorted(chain(*mine)) == sorted(chain(*theirs))
        assert all(mine)
        assert max(_cost(ours, b) for b in mine) <= max(_cost(reference, b) for b in theirs) * (1 + 1e-9)


def test_an_update_too_small_for_its_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="effective_batch_size=3"):
        ours.BatchRebalanceSampler(LENGTHS, 3, 2, 2)
