"""Samplers that scripts import, with the orders that they expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.data.order import LengthGroupedOrder, RandomOrder, SamplerOrder


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
            # The argument and not the property, which is a number: None goes on following the dataset's length.
            num_samples=sampler._num_samples,
            data_seed=seed,
        )
        super().__init__(seedable, seed)

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        self.sampler.initial_seed = self.seed  # which a checkpoint may have brought
        return super()._order(epoch)


class TokenBudgetSampler(Sampler[list[int]]):
    """A batch sampler: samples of similar length, as many as fit into `max_tokens` once they are padded.

    The batches of an epoch are a function of (seed, epoch): the samples are in the order of `group_by_length`, cut into
    batches, whose order is random. So an epoch can be entered at any batch.

    Args:
        lengths: tokens of each sample, shape (samples,).
        max_tokens: of a padded batch: its samples times its longest one.

    Raises:
        DataError: a sample is longer than `max_tokens`.
    """

    def __init__(self, lengths: Any, max_tokens: int, seed: int = 42) -> None:
        self.lengths, self.max_tokens, self.seed, self.epoch = np.asarray(lengths), max_tokens, seed, 0
        if max_tokens < 1:
            raise ConfigError(Problem("max_tokens", max_tokens, "use at least 1"))
        if len(self.lengths) and self.lengths.max() > max_tokens:
            index = int(self.lengths.argmax())
            raise DataError(
                f"sample {index} has {self.lengths[index]} tokens, and max_tokens={max_tokens}: raise it, or truncate."
            )
        self._cached: tuple[tuple[int, int], list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.of(self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.of(self.epoch))

    def of(self, epoch: int) -> list[list[int]]:
        """The batches of `epoch`: positions of samples."""
        key = (self.seed, epoch)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._batches(epoch))
        return self._cached[1]

    def _batches(self, epoch: int) -> list[list[int]]:
        if not len(self.lengths):
            return []
        typical = max(1, int(self.max_tokens // max(self.lengths.mean(), 1)))
        order = LengthGroupedOrder(self.lengths, typical, self.seed).of(epoch)
        batches: list[list[int]] = []
        longest = 0
        for position, length in zip(order.tolist(), self.lengths[order].tolist(), strict=True):
            # Lengths fall within a stretch only; the next stretch begins with a longer one.
            longest = max(longest, length)
            if not batches or longest * (len(batches[-1]) + 1) > self.max_tokens:
                batches.append([])
                longest = length
            batches[-1].append(position)
        return [batches[index] for index in RandomOrder(len(batches), self.seed).of(epoch)]
