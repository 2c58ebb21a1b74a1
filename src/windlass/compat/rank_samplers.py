"""Samplers and streams that give each process its part, for scripts that deal data out by hand.

Prepared loaders and the Trainer do without these: they share out the tail, while these repeat samples, as scripts that
name them expect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler

from windlass.data import shards
from windlass.data.dealt_rows import balanced_batches


def get_dataloader_sampler(dataloader: Any) -> Any:
    """The sampler of a loader, behind its batch sampler if it has one; None if it has neither."""
    batches = getattr(dataloader, "batch_sampler", None)
    return getattr(dataloader, "sampler", None) if batches is None else get_dataloader_sampler(batches)


def get_sampler(dataloader: Any) -> Any:
    """The sampler behind the batch sampler of a loader, wherever the loader keeps that one; None if there is none."""
    return getattr(dataloader.batch_sampler or dataloader.sampler, "sampler", None)


class DistributedSamplerWithLoop(DistributedSampler[Any]):
    """A `DistributedSampler` whose part is filled to whole batches with samples of its beginning.

    Args:
        batch_size: samples of a batch of this process.
        kwargs: for `DistributedSampler`.
    """

    def __init__(self, dataset: Any, batch_size: int, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        own = list(super().__iter__())
        # The base class has repeated the first sample of these processes already.
        first = int(self.rank < len(self.dataset) % self.num_replicas)  # type: ignore[arg-type]
        missing = -len(own) % self.batch_size
        return iter(own + own[first : first + missing])


class ShardSampler(Sampler[int]):
    """One process's part of the positions 0, 1, ...: of each stretch of `num_processes` batches, its own batch.

    Args:
        dataset: anything with a length.
        batch_size: samples of a batch of one process.
        drop_last: leave out a last stretch that is too short; otherwise it is filled with the first samples.
        num_processes, process_index: between how many processes, and which of them this is.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index = num_processes, process_index
        self.total_batch_size = batch_size * num_processes
        stretches = len(dataset) / self.total_batch_size
        self.total_num_samples = (math.floor if drop_last else math.ceil)(stretches) * self.total_batch_size

    def __len__(self) -> int:
        return self.total_num_samples // self.num_processes

    def __iter__(self) -> Iterator[int]:
        positions = list(islice(cycle(range(len(self.dataset))), self.total_num_samples))
        for start in range(self.batch_size * self.process_index, len(positions), self.total_batch_size):
            yield from positions[start : start + self.batch_size]


class SeededStreamShard(shards.IterableDatasetShard):
    """An `IterableDatasetShard` that also seeds the `generator` of a dataset without `set_epoch`.

    Args:
        seed: with the epoch, what the dataset's generator is seeded with, so that all processes draw the same.

    Attributes:
        num_examples: samples of all processes that the latest iteration has read.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, batch_size, drop_last, num_processes, process_index)
        self.seed, self.epoch, self.num_examples = seed, 0, 0

    def samples(self) -> Iterator[Any]:
        self.num_examples = 0
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.seed + self.epoch)
        for sample in self.dataset:
            self.num_examples += 1
            yield sample


# The name that scripts import; `windlass.data_loader` has the base class.
IterableDatasetShard = SeededStreamShard


class BatchRebalanceSampler(Sampler[list[int]]):
    """Batches of one process, of such sizes that padded batches cost about the same on all processes.

    Every update takes the same samples as a shuffled order would; the engine's own cut
    (`windlass.data.dealt_rows.balanced_batches`) deals them to processes and micro-batches.

    Args:
        lengths: length of each sample, in tokens.
        effective_batch_size: samples of an update, over all processes and micro-batches.
        dp_size, grad_accum: processes, and micro-batches of an update.
        shuffle, seed: a new order in each epoch, drawn from the sum of seed and epoch.
        rank: which of the processes this is.
        drop_last: leave out an incomplete last update; otherwise samples of the beginning fill it as far as every
            process needs one.

    Raises:
        ValueError: an update has fewer samples than there are micro-batches.
    """

    def __init__(
        self,
        lengths: Any,
        effective_batch_size: int,
        dp_size: int,
        grad_accum: int,
        shuffle: bool = True,
        seed: int = 42,
        rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        if not 1 <= dp_size * grad_accum <= effective_batch_size:
            raise ValueError(
                f"effective_batch_size={effective_batch_size} is less than one sample for each of {dp_size} processes "
                f"times {grad_accum} micro-batches; increase it"
            )
        self.lengths, self.effective_batch_size = list(lengths), effective_batch_size
        self.dp_size, self.grad_accum, self.rank = dp_size, grad_accum, rank
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0
        updates = len(self.lengths) / effective_batch_size
        self.num_global_batches = math.floor(updates) if drop_last else math.ceil(updates)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_global_batches * self.grad_accum

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for update in range(self.num_global_batches):
            start = update * self.effective_batch_size
            ids = order[start : start + self.effective_batch_size]
            missing = self.dp_size * self.grad_accum - len(ids)
            ids += islice(cycle(order), max(0, missing))
            rows = balanced_batches(ids, [self.lengths[i] for i in ids], self.grad_accum, self.dp_size)
            yield from (row[self.rank] for row in rows)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.lengths)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return list(torch.randperm(len(self.lengths), generator=generator).tolist())
