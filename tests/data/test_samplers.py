"""The seedable sampler's order is accelerate's, in a prepared loader too."""

from __future__ import annotations

from typing import Any

import accelerate.data_loader as peer
import pytest
import torch
from torch.utils.data import DataLoader

from windlass.config.loop_options import DataLoaderConfiguration
from windlass.data.prepare_loader import prepare_loader
from windlass.data.samplers import SeedableRandomSampler
from windlass.dist.gang import Gang


@pytest.mark.parametrize("seed", [None, 7])
def test_the_order_of_each_epoch(seed: int | None) -> None:
    torch.manual_seed(3)
    mine, theirs = (
        kind(range(20), data_seed=seed) for kind in (SeedableRandomSampler, peer.SeedableRandomSampler)
    )
    assert [list(mine), list(mine)] == [list(theirs), list(theirs)]
    mine.set_epoch(9)
    theirs.set_epoch(9)
    assert list(mine) == list(theirs)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_prepared_loader_shuffles_as_accelerate_does(seed: int | None) -> None:
    def passes(loader: Any) -> list[list[int]]:
        return [[int(i) for batch in loader for i in batch] for _ in range(2)]

    def make() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(list(range(20)), batch_size=4, shuffle=True)  # type: ignore[arg-type]

    options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
    mine = prepare_loader(make(), ranks=1, rank=0, device=None, options=options, data_ranks=Gang())
    theirs = peer.prepare_data_loader(make(), use_seedable_sampler=True, data_seed=seed)
    assert passes(mine) == passes(theirs)


def test_a_checkpoint_brings_its_seed() -> None:
    def make(seed: int) -> Any:
        options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
        loader = DataLoader(list(range(20)), batch_size=20, shuffle=True)  # type: ignore[arg-type]
        return prepare_loader(loader, ranks=1, rank=0, device=None, options=options, data_ranks=Gang())

    first, other = make(1), make(2)
    other.load_state_dict(first.state_dict())
    assert next(iter(other)).tolist() == next(iter(first)).tolist()
