"""Samplers that put samples of similar length side by side, in the orders that scripts expect of them.

The Trainer's own order, `windlass.data.order.LengthGroupedOrder`, does the same as a function of (seed, epoch).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from windlass.core.errors import DataError
from windlass.data.order import sample_lengths


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """A random order in which samples of similar length are neighbours, and the longest of all comes first.

    A random permutation is cut into stretches, each sorted by falling length.

    Args:
        batch_size: samples of a batch.
        mega_batch_mult: batches of a stretch; by default 50, or fewer for at least four stretches.
        generator: what the permutation is drawn from; PyTorch's own by default.
    """
    batches = mega_batch_mult or max(1, min(len(lengths) // (batch_size * 4), 50))
    size = batches * batch_size
    order = torch.randperm(len(lengths), generator=generator).tolist()
    stretches = [
        sorted(order[start : start + size], key=lengths.__getitem__, reverse=True)
        for start in range(0, len(order), size)
    ]
    if stretches:
        longest = max(stretches, key=lambda stretch: lengths[stretch[0]])
        # So that memory runs out at once, if it does.
        stretches[0][0], longest[0] = longest[0], stretches[0][0]
    return [index for stretch in stretches for index in stretch]


def _lengths(dataset: Any, lengths: Any, model_input_name: str | None) -> list[int]:
    if lengths is not None:
        return lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if dataset is None:
        raise DataError("give a dataset or the lengths of its samples")
    return list(sample_lengths(dataset, tokens=model_input_name or "input_ids").tolist())


class LengthGroupedSampler(Sampler[int]):
    """A random order that puts samples of similar length side by side; see `get_length_grouped_indices`.

    Args:
        batch_size: samples of a batch.
        dataset: its samples are measured if `lengths` is None.
        lengths: length of each sample.
        model_input_name: the column that is measured, `input_ids` by default.
        generator: what the order is drawn from.

    Raises:
        DataError: neither dataset nor lengths; or samples that cannot be measured.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        lengths: Any = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.batch_size, self.generator = batch_size, generator
        self.lengths = _lengths(dataset, lengths, model_input_name)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator))


class DistributedLengthGroupedSampler(DistributedSampler[Any]):
    """One process's part of such an order, which is the same on all processes: a function of (seed, epoch).

    Args:
        num_replicas, rank: between how many processes, and which of them this is; by default as the process group has.
        seed: of the order, together with the epoch.
        drop_last: leave out samples that the processes cannot share evenly; otherwise the first samples come twice.

    Other arguments are those of `LengthGroupedSampler`.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Any = None,
        model_input_name: str | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.lengths = _lengths(dataset, lengths, model_input_name)
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.seed, self.drop_last, self.epoch = seed, drop_last, 0
        share = len(self.lengths) / self.num_replicas
        self.num_samples = math.floor(share) if drop_last else math.ceil(share)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        # Again and again: there may be more processes than samples, and each waits for the others in every batch.
        whole = list(islice(cycle(order), self.total_size))
        return iter(whole[self.rank :: self.num_replicas])
