"""Passes that begin after their first batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from windlass.core.errors import ConfigError, Problem
from windlass.data.prepared_loader import PreparedLoader


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, whose samples are never read."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]

    @property
    def total_length(self) -> int:
        """Batches with those that are skipped."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


class SkippingLoader:
    """Any loader without its first batches, which are read and dropped; for streams nothing else is possible."""

    def __init__(self, loader: Any, skip_batches: int = 0) -> None:
        self.loader, self.skip_batches = loader, skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.loader) - self.skip_batches, 0)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """`dataloader` for one pass without its first `num_batches`, counted from the beginning of the pass.

    For a prepared loader this is a view: at once for map-style data, and with shared epochs, so that the next pass over
    the loader itself is the next epoch. Streams are read up to the position, unless a state was loaded that was taken
    there (`PreparedLoader.load_state_dict`, `Accelerator.load_state`) and can be entered.

    Args:
        dataloader: a prepared loader, a `DataLoader`, or any iterable of batches.
        num_batches: batches of this rank.

    Raises:
        ConfigError: their number is negative.
    """
    if num_batches < 0:
        raise ConfigError(Problem("num_batches", num_batches, "must not be negative"))
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if type(dataloader) is not DataLoader or isinstance(dataloader.dataset, IterableDataset):
        return SkippingLoader(dataloader, num_batches)
    if dataloader.batch_sampler is None:
        return SkippingLoader(dataloader, num_batches)
    return with_batch_sampler(dataloader, SkipBatchSampler(dataloader.batch_sampler, num_batches))


def skips_unread(loader: Any) -> bool:
    """Return True if a pass over `loader` may begin at any batch without changing the batches.

    In worker processes, what a batch draws at random depends on how many the worker has read before.
    """
    plain = type(loader) is DataLoader and not loader.num_workers and loader.batch_sampler is not None
    return plain and not isinstance(loader.dataset, IterableDataset)


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """The same loader with other batches: lists of positions."""
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
            "in_order": loader.in_order,
        }
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **workers,
    )
