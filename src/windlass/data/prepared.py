"""From a user's `DataLoader` to one whose batches are dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from windlass.config.plan import DataPlan
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.data.fetch import Fetch
from windlass.data.map_reader import MapReader
from windlass.data.order import Order, RandomOrder, SamplerOrder, SequentialOrder
from windlass.data.portion import Reader
from windlass.data.prepared_loader import PreparedLoader
from windlass.data.rows import BatchRows, Rows, SampleRows
from windlass.data.source import Source
from windlass.dist.gang import Gang


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How a user's loader is dealt to ranks.

    Attributes:
        split_batches: the loader's batch size is that of all ranks together, not of each.
        dispatch_batches: the main process alone reads, and sends the others their part.
        even_batches: kept for scripts that set it. The tail is always shared out without repeating a sample, and
            every rank always gets the same number of batches.
        use_seedable_sampler: shuffle by a `SeedableRandomSampler`, in the order that accelerate gives.
        data_seed: what the order of shuffled loaders depends on; None: a number drawn from PyTorch's generator.
        non_blocking: copy to the device without waiting; of use for page-locked memory.
        use_stateful_dataloader: `load_state_dict` goes back into the middle of a pass.
        slice_fn: how dispatched batches are cut: `slice_fn(batch, slice, process_index=, num_processes=)`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    slice_fn: Callable[..., Any] | None = None


def prepare_loader(
    loader: Any,
    *,
    world: int,
    rank: int,
    device: torch.device | None,
    options: LoaderOptions,
    gang: Gang,
) -> PreparedLoader:
    """The loader that deals `loader`'s samples to ranks. To be called on all ranks: they agree on a seed.

    Args:
        loader: a `DataLoader`, which is only read from; one that was prepared already is given back.
        world, rank: over how many ranks the samples are dealt, and which of them this is.
        device: where batches are put; None leaves them on the host.
        gang: for what ranks must agree on.

    Raises:
        ConfigError: an option that this loader cannot have.
        DataError: no `DataLoader`, or one that cannot be dealt.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"{type(loader).__name__} is no torch.utils.data.DataLoader, so it cannot be prepared."
        )
    seed = _agreed_seed(options.data_seed, gang)
    reader = _reader(loader, world, rank, seed, options)
    return PreparedLoader(
        loader,
        reader,
        seed=seed,
        rank=rank,
        world=world,
        device=device,
        non_blocking=options.non_blocking,
        restores_position=options.use_stateful_dataloader,
    )


def _agreed_seed(data_seed: int | None, gang: Gang) -> int:
    """Rank 0's number. Every rank draws, so that their generators stay in step."""
    if data_seed is not None:
        return data_seed
    drawn = int(torch.empty((), dtype=torch.int64).random_())
    return int(gang.broadcast_object(drawn))


def _reader(loader: DataLoader[Any], world: int, rank: int, seed: int, options: LoaderOptions) -> Reader:
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(Problem("dataset", type(loader.dataset).__name__, "streams are not dealt yet"))
    plan = _plan(loader, seed)
    fetch = Fetch(loader.dataset, loader.collate_fn, seed)
    return MapReader(_rows(loader, world, seed, options), Source(fetch, plan), rank)


def _rows(loader: DataLoader[Any], world: int, seed: int, options: LoaderOptions) -> Rows:
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler:
        return BatchRows(sampler, seed, world, options.split_batches)
    size = sampler.batch_size if options.split_batches else sampler.batch_size * world
    return SampleRows(_order(sampler.sampler, seed), size, world, sampler.drop_last)


def _order(sampler: Any, seed: int) -> Order:
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler), seed)
    if type(sampler) is RandomSampler and _is_plain(sampler):
        return RandomOrder(len(sampler), seed)
    return SamplerOrder(sampler, seed)


def _is_plain(sampler: RandomSampler) -> bool:
    """A permutation of everything that draws from the default generator."""
    everything = sampler.num_samples == len(sampler.data_source)
    return everything and not sampler.replacement and sampler.generator is None


def _plan(loader: DataLoader[Any], seed: int) -> DataPlan:
    return DataPlan(
        workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        in_order=loader.in_order,
        seed=seed,
        worker_init=loader.worker_init_fn,
        worker_timeout=loader.timeout,
    )
