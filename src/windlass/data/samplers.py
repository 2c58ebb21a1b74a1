"""Samplers that scripts import, with the orders that they expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler

from windlass.data.order import SamplerOrder


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of (seed, epoch): that of a generator seeded with their sum.

    Args:
        data_seed: the seed; None is the one that PyTorch's generator was given.

    Other arguments are `RandomSampler`'s. Iterating to the end moves on to the next epoch.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`: its order is seeded by `data_seed + epoch`."""
        self.epoch = epoch


class SeedableOrder(SamplerOrder):
    """The orders of a `SeedableRandomSampler` that replaces a user's `RandomSampler`."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        seedable = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            data_seed=seed,
        )
        super().__init__(seedable, seed)

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        self.sampler.initial_seed = self.seed  # which a checkpoint may have brought
        return super()._order(epoch)
