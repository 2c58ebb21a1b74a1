"""Selects the reader for a user's loader by its dataset, its sampler and how it is to be dealt."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from windlass.config.plan import DataPlan
from windlass.core.errors import DataError, Problem, refuse
from windlass.core.logs import get_logger
from windlass.core.trees import batch_size_of
from windlass.data.agreed_stream import AgreedStream
from windlass.data.batch_reader import BatchReader, DealtBatch, PassRequest
from windlass.data.bookmark import checksum
from windlass.data.collate_pad import plain_collate
from windlass.data.dealt_rows import BatchRows, Rows, SampleRows
from windlass.data.dispatch import Dispatched
from windlass.data.fetch import Fetch, FetchItem
from windlass.data.lockstep_reader import LockstepReader
from windlass.data.map_reader import MapReader
from windlass.data.order import (
    Order,
    RandomOrder,
    SamplerOrder,
    SequentialOrder,
    known_length,
    ordering_parts,
)
from windlass.data.same_stream import splits_itself
from windlass.data.samplers import SeedableOrder
from windlass.data.seeding import DatasetEpoch, set_epochs
from windlass.data.source import Source
from windlass.data.stream import RowCutter, SharedStream
from windlass.data.workers import START_TIMEOUT, Reader, read_batches
from windlass.dist.gang import Gang


class PassthroughReader:
    """One rank's batches, read one ahead to detect the last. A position is reached by reading up to it."""

    unit = "batches"

    def __init__(self, loader: Any, start_timeout: float = START_TIMEOUT) -> None:
        self._loader = loader
        self._reader = Reader(f"a prepared {type(loader).__name__}", start_timeout)

    @property
    def total_batch_size(self) -> int | None:
        return getattr(self._loader, "batch_size", None)

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        loader, start = self._loader, wanted.start
        if start:
            name = type(loader).__name__
            logger.warning(f"reading {start} batches of {name} again, to continue after them")
        set_epochs(wanted.epoch, loader, *ordering_parts(loader))
        dataset_epoch = DatasetEpoch.of(getattr(loader, "dataset", None))
        dataset_epoch.set(wanted.epoch)
        batches, done = read_batches(loader, self._reader), 0
        batch = next(batches, _END)
        while batch is not _END:
            if dataset_epoch.value != wanted.epoch:
                dataset_epoch.set(wanted.epoch)
            following, done = next(batches, _END), done + 1
            if done > start:
                yield DealtBatch(batch, (batch_size_of(batch) or 1,), done, following is _END)
            batch = following

    def count(self, epoch: int, start: int = 0) -> int | None:
        whole = known_length(self._loader)
        return None if whole is None else max(whole - start, 0)

    def position(self, epoch: int, batches: int) -> int:
        return batches

    def reseed(self, seed: int) -> None:
        """Does nothing: the loader seeds itself."""


_END = object()


logger = get_logger(__name__)


class ReaderChoice:
    """Chooses and builds readers for one loader.

    Args:
        split: the loader's batch size is that of all ranks together.
        seedable: replace a random sampler by the seedable one.
        data_ranks: the ranks.
        start_timeout: seconds after which a worker that has not started is replaced.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        seed: int,
        split: bool,
        seedable: bool,
        data_ranks: Gang,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        self._loader, self._dataset = loader, loader.dataset
        self._seed, self._split, self._seedable, self._data_ranks = seed, split, seedable, data_ranks
        self._unbatched = loader.batch_sampler is None and loader.batch_size is None
        self._plan = _plan(loader, seed, start_timeout)

    def reader(
        self, ranks: int, rank: int, *, dispatch: bool = False, slice_fn: Callable[..., Any] | None = None
    ) -> BatchReader:
        """The reader of `rank`.

        Raises:
            ConfigError: an option that this loader cannot have.
            DataError: its batches cannot be dealt.
        """
        self._refuse_contradictions(ranks, dispatch)
        if dispatch and ranks > 1:
            alone = copy.copy(self)
            # The main process reads without exchanges: other ranks may have no data.
            alone._data_ranks = Gang()
            is_stream = isinstance(self._dataset, IterableDataset) and not _iterates_in_its_own_way(
                self._loader
            )
            return Dispatched(
                alone.reader(1, 0),
                self._data_ranks,
                split=self._split,
                drop_last=self._plan.drop_last,
                stream=self._shared(1, 1, 0) if is_stream else None,
                slice_fn=slice_fn,
            )
        if _iterates_in_its_own_way(self._loader):
            return self._own_iteration(ranks)
        if isinstance(self._dataset, IterableDataset):
            return self._stream(ranks, rank)
        return self._map(ranks, rank)

    def _map(self, ranks: int, rank: int) -> BatchReader:
        loader, seed = self._loader, self._seed
        if not self._unbatched:
            fetch = Fetch(self._dataset, _collate(loader), seed)
            return MapReader(self._rows(ranks), Source(fetch, self._plan), rank)
        many = isinstance(loader.sampler, BatchSampler)
        source = Source(FetchItem(self._dataset, loader.collate_fn, seed, many), self._plan)
        if many:
            return MapReader(self._batch_rows(loader.sampler, ranks), source, rank)
        rows = SampleRows(self._order(loader.sampler), ranks, ranks, drop_last=False)
        return LockstepReader(MapReader(rows, source, rank), self._data_ranks)

    def _rows(self, ranks: int) -> Rows:
        sampler = self._loader.batch_sampler
        # A subclass, or a class of the user's, decides what a batch is; PyTorch's own only cuts the sampler's
        # order.
        if type(sampler) is not BatchSampler:
            return self._batch_rows(sampler, ranks)
        order = self._order(sampler.sampler)
        return SampleRows(order, self._row(sampler.batch_size, ranks), ranks, sampler.drop_last)

    def _row(self, batch_size: int, ranks: int) -> int:
        return batch_size if self._split else batch_size * ranks

    def _order(self, sampler: Any) -> Order:
        if isinstance(sampler, Order):
            return sampler
        # By type, not `isinstance`: a subclass may have an order of its own.
        if type(sampler) is SequentialSampler:
            return SequentialOrder(len(sampler), self._seed)
        if type(sampler) is RandomSampler and self._seedable:
            return SeedableOrder(sampler, self._seed)
        if type(sampler) is RandomSampler and _is_plain(sampler):
            return RandomOrder(len(sampler), self._seed)
        order = SamplerOrder(sampler, self._seed)
        if self._data_ranks.size > 1:
            self._compare(sampler, order.of(0).tolist())
        return order

    def _batch_rows(self, sampler: Any, ranks: int) -> BatchRows:
        rows = BatchRows(sampler, self._seed, ranks, self._split)
        if self._data_ranks.size > 1:
            self._compare(sampler, rows.of(0))
        return rows

    def _compare(self, sampler: Any, order: list[Any]) -> None:
        """Raise if the ranks' samplers differ, as with a generator that is not seeded alike: samples would be lost."""
        if len(set(self._data_ranks.gather_objects(checksum(order)))) > 1:
            raise DataError(
                f"{type(sampler).__name__} returns different orders on the ranks. Let it draw from PyTorch's, NumPy's "
                "or Python's default generator, which are seeded alike, or seed its own the same on every rank."
            )

    def _stream(self, ranks: int, rank: int) -> BatchReader:
        if ranks > 1 and splits_itself(self._dataset):
            name = type(self._dataset).__name__
            logger.info(f"{name} was split by node: every rank reads its own part, in an order of its own")
            return LockstepReader(self._part(ranks), self._data_ranks)
        size = self._loader.batch_size
        common = self._shared(ranks if size is None else self._row(size, ranks), ranks, rank)
        if ranks > 1 and self._data_ranks.size > 1:
            return AgreedStream(
                common, self._part(ranks), self._data_ranks, lockstep=True, counted=size is None
            )
        return LockstepReader(common, self._data_ranks) if size is None else common

    def _shared(self, row: int, ranks: int, rank: int) -> SharedStream:
        collate = self._loader.collate_fn
        if self._loader.batch_size is None:
            # A partial of a module's function, which can be sent to a worker that is spawned.
            collate = functools.partial(_convert_single, collate)
        cutter = RowCutter(self._dataset, collate, self._plan, row, ranks, rank)
        return SharedStream(cutter, self._plan, may_be_empty=True)

    def _part(self, ranks: int) -> SharedStream:
        """Everything that this rank reads of a stream that splits itself."""
        size = self._loader.batch_size
        row = 1 if size is None else max(size // ranks, 1) if self._split else size
        return self._shared(row, 1, 0)

    def _own_iteration(self, ranks: int) -> BatchReader:
        if ranks > 1:
            raise DataError(
                f"{type(self._loader).__name__} has an __iter__ of its own, so its samples cannot be dealt to ranks. "
                "Set dispatch_batches=True to let the main process iterate it for all, or do not prepare it if every "
                "rank gets data of its own."
            )
        return PassthroughReader(self._loader, self._plan.start_timeout)

    def _refuse_contradictions(self, ranks: int, dispatch: bool) -> None:
        problems = []
        split_by_node = splits_itself(self._dataset)
        if self._split and self._unbatched and not isinstance(self._loader.sampler, BatchSampler):
            fix = "the loader has no batch size (batch_size=None), so there is nothing to split; leave it out"
            problems.append(Problem("split_batches", True, fix))
        size = self._loader.batch_size
        if self._split and ranks > 1 and split_by_node and size is not None and size % ranks:
            fix = f"every rank reads its own part of the data, and a batch size of {size} is not a multiple of {ranks}"
            problems.append(Problem("split_batches", True, fix))
        if dispatch and ranks > 1 and split_by_node:
            fix = "the dataset was split by node, so the main process has only a part of it; pass the whole dataset"
            problems.append(Problem("dispatch_batches", True, fix))
        refuse(problems)


def _convert_single(convert: Callable[[Any], Any], items: list[Any]) -> Any:
    """Convert an item that is a batch already."""
    return convert(items[0])


def _collate(loader: DataLoader[Any]) -> Any:
    """The loader's collator; a faster one for PyTorch's default, which only in workers stacks into shared memory."""
    if loader.collate_fn is default_collate and not loader.num_workers:
        return plain_collate
    return loader.collate_fn


def _is_plain(sampler: RandomSampler) -> bool:
    """Return True for a permutation of all samples that draws from the default generator."""
    everything = sampler.num_samples == len(sampler.data_source)
    return everything and not sampler.replacement and sampler.generator is None


def _iterates_in_its_own_way(loader: DataLoader[Any]) -> bool:
    """Return True for a subclass with its own `__iter__`, except torchdata's, which returns the same batches."""
    kind = type(loader)
    return kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata.")


def _plan(loader: DataLoader[Any], seed: int, start_timeout: float) -> DataPlan:
    return DataPlan(
        workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        in_order=loader.in_order,
        worker_init=loader.worker_init_fn,
        worker_timeout=loader.timeout,
        start_timeout=start_timeout,
        purpose="a prepared loader",
        drop_last=bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)),
        seed=seed,
    )
