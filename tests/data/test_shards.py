"""Shards by hand give what accelerate's of the same name give."""

from __future__ import annotations

from typing import Any

import accelerate.data_loader as peer
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset

from windlass.core.errors import ConfigError
from windlass.data.shards import BatchSamplerShard, IterableDatasetShard

CASE = {
    "count": st.integers(0, 30),
    "batch": st.integers(1, 6),
    "world": st.integers(1, 4),
    "drop_last": st.booleans(),
    "split": st.booleans(),
}


class Count(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(range(self.count))


class Ragged:
    """Batches of differing sizes, and no `batch_size`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter([[10 * i + k for k in range(i % 3 + 1)] for i in range(self.count)])


@given(**CASE, even=st.booleans())
def test_batches(count: int, batch: int, world: int, drop_last: bool, split: bool, even: bool) -> None:
    assume(not split or batch % world == 0)
    for rank in range(world):
        shards = [
            kind(BatchSampler(range(count), batch, drop_last), world, rank, split, even)
            for kind in (BatchSamplerShard, peer.BatchSamplerShard)
        ]
        assert list(shards[0]) == list(shards[1])
        assert (len(shards[0]), shards[0].total_length) == (len(shards[1]), shards[1].total_length)


@given(count=CASE["count"], world=CASE["world"], even=st.booleans())
def test_batches_without_a_size(count: int, world: int, even: bool) -> None:
    for rank in range(world):
        mine, theirs = (
            list(kind(Ragged(count), world, rank, False, even))
            for kind in (BatchSamplerShard, peer.BatchSamplerShard)
        )
        assert mine == theirs


@given(**CASE)
def test_streams(count: int, batch: int, world: int, drop_last: bool, split: bool) -> None:
    assume(not split or batch % world == 0)
    for rank in range(world):
        shards = [
            kind(Count(count), batch, drop_last, world, rank, split)
            for kind in (IterableDatasetShard, peer.IterableDatasetShard)
        ]
        assert list(shards[0]) == list(shards[1])
        assert len(shards[0]) == len(list(shards[0]))
        assert split or len(shards[0]) == len(shards[1])  # theirs does not count parts of split batches


def test_a_split_that_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of the 2 processes"):
        BatchSamplerShard(BatchSampler(range(9), 3, False), 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match="multiple of the 2 processes"):
        IterableDatasetShard(Count(9), 3, num_processes=2, split_batches=True)
    with pytest.raises(ConfigError, match="multiple of the 2 processes"):
        IterableDatasetShard(Count(9), 1, num_processes=2, split_batches=True)
