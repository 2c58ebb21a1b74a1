"""Token-budget batches: every sample once, within the budget, the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from windlass.core.errors import ConfigError, DataError
from windlass.data.batch_reader import PassRequest
from windlass.data.choice import ReaderChoice
from windlass.data.samplers import TokenBudgetSampler
from windlass.dist.gang import Gang


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(20, 50), st.integers(0, 3))
def test_every_sample_once_and_within_the_budget(lengths: list[int], budget: int, epoch: int) -> None:
    sampler = TokenBudgetSampler(lengths, budget)
    batches = sampler.of(epoch)
    assert sorted(index for batch in batches for index in batch) == [*range(len(lengths))]
    assert all(len(batch) * max(lengths[index] for index in batch) <= budget for batch in batches)
    assert batches == TokenBudgetSampler(lengths, budget).of(epoch), "a function of the seed and the epoch"


def test_epochs_differ_and_little_is_padded() -> None:
    lengths = np.random.default_rng(0).lognormal(3, 0.9, 2000).astype(int) + 1
    sampler = TokenBudgetSampler(lengths, 512)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    padded = sum(len(batch) * lengths[batch].max() for batch in first)
    assert lengths.sum() / padded > 0.85


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_order_is_that_of_any_number_of_ranks(world: int) -> None:
    lengths = [3, 9, 4, 1, 7, 7, 2, 5, 6, 8, 3, 3]
    loader: DataLoader[Any] = DataLoader(
        range(12),  # type: ignore[arg-type]
        batch_sampler=TokenBudgetSampler(lengths, 12),
        collate_fn=lambda samples: {"index": samples},
    )
    choice = ReaderChoice(loader, seed=1, split=False, seedable=True, data_ranks=Gang())
    per_rank = [
        [batch.ids for batch in choice.reader(world, rank).read(PassRequest(0))] for rank in range(world)
    ]
    whole = TokenBudgetSampler(lengths, 12).of(0)
    full = len(whole) // world
    assert [per_rank[number % world][number // world] for number in range(full * world)] == whole[
        : full * world
    ]


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(DataError, match="sample 1 has 9 tokens"):
        TokenBudgetSampler([3, 9], 8)
    with pytest.raises(ConfigError, match="max_tokens=0"):
        TokenBudgetSampler([], 0)
