"""Turns a user's `DataLoader` into one whose batches are dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from windlass.config.loop_options import DataLoaderConfiguration
from windlass.core.errors import DataError
from windlass.data.batch_reader import wants_pinning
from windlass.data.choice import ReaderChoice
from windlass.data.order import known_length, ordering_parts, own_generators
from windlass.data.prepared_loader import PreparedLoader
from windlass.data.workers import START_TIMEOUT
from windlass.dist.gang import Gang


def prepare_loader(
    loader: Any,
    *,
    ranks: int,
    rank: int,
    device: torch.device | None,
    options: DataLoaderConfiguration,
    data_ranks: Gang,
    start_timeout: float = START_TIMEOUT,
    slice_fn: Callable[..., Any] | None = None,
) -> PreparedLoader:
    """The loader that deals `loader`'s samples to ranks. To be called on all ranks: they agree on a seed.

    Args:
        loader: a `DataLoader`, which is not changed; one that was prepared already is returned.
        ranks, rank: over how many ranks the samples are dealt, and which of them this is.
        device: of the returned batches; None leaves them on the host.
        options: `even_batches` has no effect: the tail is always divided without repeating a sample, and every rank
            always gets the same number of batches.
        data_ranks: for what ranks must agree on; with streams that split themselves and dispatched batches it must have
            `ranks` ranks.
        start_timeout: seconds after which a worker that has not started is replaced.
        slice_fn: how dispatched batches are cut: `slice_fn(batch, slice, process_index=, num_processes=)`.

    Raises:
        ConfigError: an option that this loader cannot have.
        DataError: not a `DataLoader`, one that cannot be dealt, or different ones on different ranks.
    """
    skipped = 0
    if isinstance(loader, PreparedLoader):
        if loader.is_dealt:
            return loader
        loader, skipped = loader.loader, loader.skipped
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"{type(loader).__name__} is not a torch.utils.data.DataLoader, so it cannot be prepared."
        )
    seed = _agreed_seed(loader, options, data_ranks)
    reader = ReaderChoice(
        loader,
        seed=seed,
        split=options.split_batches,
        seedable=options.use_seedable_sampler,
        data_ranks=data_ranks,
        start_timeout=start_timeout,
    ).reader(ranks, rank, dispatch=bool(options.dispatch_batches), slice_fn=slice_fn)
    dealt = PreparedLoader(
        loader,
        reader,
        seed=seed,
        rank=rank,
        ranks=ranks,
        device=device,
        non_blocking=options.non_blocking or wants_pinning(loader.pin_memory),
        restores_position=options.use_stateful_dataloader,
    )
    return dealt.skipping(skipped) if skipped else dealt


def _agreed_seed(loader: DataLoader[Any], options: DataLoaderConfiguration, data_ranks: Gang) -> int:
    """Rank 0's seed, also for the loader's own generators.

    Every rank draws, so that their generators stay in step.

    Raises:
        DataError: on all ranks: their datasets differ in size, or the generators that their loaders have.
    """
    generators = own_generators(loader, *ordering_parts(loader))
    here = [_seed(options), [first for _, first in generators], _length(loader.dataset)]
    everywhere = data_ranks.gather_objects(here)
    lengths = [length for _, _, length in everywhere]
    if len(set(lengths)) > 1:
        raise DataError(
            f"the ranks hold {type(loader.dataset).__name__}s of different sizes: {lengths}. Samples are dealt "
            "to ranks when a loader is prepared, so give every rank the whole dataset."
        )
    counts = [len(firsts) for _, firsts, _ in everywhere]
    if len(set(counts)) > 1:
        raise DataError(
            f"the ranks' loaders have different numbers of generators: {counts}. Give a sampler its generator on every "
            "rank, or on none."
        )
    seed, firsts, _ = everywhere[0]
    for (generator, first), agreed in zip(generators, firsts, strict=True):
        if first is not None and first != agreed:
            generator.manual_seed(agreed)
    return int(seed)


def _seed(options: DataLoaderConfiguration) -> int:
    if options.data_seed is not None:
        return options.data_seed
    if options.use_seedable_sampler:
        # The seed that the script gave to PyTorch, as `SeedableRandomSampler` takes it.
        return torch.random.initial_seed()
    # As a `DataLoader` draws its base seed.
    return int(torch.empty((), dtype=torch.int64).random_())


def _length(dataset: Any) -> int | None:
    if isinstance(dataset, IterableDataset):
        return None  # it may split itself, and parts may differ
    return known_length(dataset)
