"""The loader classes of accelerate, for scripts that construct them or derive from them.

What `Accelerator.prepare` returns is a `PreparedLoader`, which replaces all of them: `isinstance` returns True for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from windlass.accelerator.exchange import share_rng_states
from windlass.compat.state import GradientState, PartialState
from windlass.config.enums import RNGType
from windlass.config.loop_options import DataLoaderConfiguration
from windlass.core import rng
from windlass.data import shards
from windlass.data.batch_reader import BatchReader, DealtBatch, PassRequest
from windlass.data.choice import PassthroughReader, ReaderChoice
from windlass.data.dealt_rows import balanced_batches
from windlass.data.order import known_length
from windlass.data.prepare_loader import prepare_loader
from windlass.data.prepared_loader import PreparedLoader
from windlass.data.shards import BatchSamplerShard
from windlass.data.workers import start_timeout
from windlass.dist.gang import Gang, current

# Samplers and streams that give each process its part, for scripts that deal data out by hand.
#
# Prepared loaders and the Trainer do without these: they share out the tail, while these repeat samples, as scripts
# that name them expect.


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


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and PyTorch on every device.

    Args:
        device_specific: use a different seed on each process: `seed` plus its index.
        deterministic: also select deterministic kernels.
    """
    rng.set_seed(seed + (PartialState().process_index if device_specific else 0), deterministic)


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None
) -> None:
    """Copy the states of the main process's generators to all processes. Collective. Raises ConfigError if no generator
    was passed, or a type of device that this process does not use.

    Args:
        rng_types: "torch" for the CPU's default generator, "generator" for `generator`, or a type of device.
    """
    share_rng_states(rng_types, PartialState().device, generator)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None
) -> None:
    """`synchronize_rng_states` for one generator."""
    synchronize_rng_states([str(rng_type)], generator)


class _ReplacedByPrepared(type(PreparedLoader)):  # type: ignore[misc]
    """Makes every prepared loader an instance of the class."""

    def __instancecheck__(cls, item: object) -> bool:
        return super().__instancecheck__(item) or type(item) is PreparedLoader


class DataLoaderShard(PreparedLoader, metaclass=_ReplacedByPrepared):
    """A loader whose batches are this process's own: those that `DataLoader(dataset, **options)` returns.

    Nothing is dealt to ranks here: `options` may have a `BatchSamplerShard`, which does that. Rows that it repeats to
    complete the last batch are not counted (`samples_here`). `Accelerator.prepare` deals a loader that has none.

    Args:
        device: of the returned batches; None leaves them unchanged.
        rng_types: generators to make equal on all processes at the start of a pass, and `synchronized_generator`.
        skip_batches: batches to leave out at the start of each pass.
        use_stateful_dataloader: `load_state_dict` restores the position within a pass; otherwise its start.
        torch_device_mesh: no effect.
        iteration: number of the first pass.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **options: Any,
    ) -> None:
        loader = DataLoader(dataset, **options)
        sampler = loader.batch_sampler
        self.is_dealt = isinstance(sampler, BatchSamplerShard)
        rank, world = (sampler.process_index, sampler.num_processes) if self.is_dealt else (0, 1)  # type: ignore[union-attr]
        self._construct(
            loader,
            ShardReader(loader, world),
            rank=rank,
            ranks=world,
            device=None if device is None else torch.device(device),
            non_blocking=_non_blocking,
            restores_position=use_stateful_dataloader,
        )
        self.rng_types, self.synchronized_generator = rng_types, synchronized_generator
        self._take(skip_batches, iteration, _drop_last)

    def _construct(self, loader: DataLoader[Any], reader: BatchReader, seed: int = 0, **options: Any) -> None:
        super().__init__(loader, reader, seed=seed, **options)
        self.gradient_state: Any = GradientState()
        self.follower = self.gradient_state

    def _take(self, skip_batches: int, iteration: int, drop_last: bool) -> None:
        self.skip_batches = self._skip = skip_batches
        self._drops_last |= drop_last
        self.set_epoch(iteration)
        self._enter()

    def __iter__(self) -> Any:
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        return super().__iter__()


class SkipDataLoader(DataLoaderShard):
    """`DataLoader(dataset, **options)` whose passes begin after their first `skip_batches` batches."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **options: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **options
        )


class DataLoaderDispatcher(DataLoaderShard):
    """`DataLoader(dataset, **options)` that only the main process reads; each process gets its share. Collective.

    Args:
        split_batches: the batch size is that of all processes together.
        slice_fn: cuts batches: `slice_fn(batch, slice, process_index=, num_processes=)`.

    Other arguments are those of `DataLoaderShard`.
    """

    is_dealt = True

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Any = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **options: Any,
    ) -> None:
        loader, state, data_ranks = DataLoader(dataset, **options), PartialState(), current().over("data")
        # As PyTorch's loaders draw theirs, so that a script's own seed decides about it; of the main process for all.
        seed = int(data_ranks.broadcast_object(int(torch.empty((), dtype=torch.int64).random_())))
        choice = ReaderChoice(loader, seed=seed, split=split_batches, seedable=False, data_ranks=data_ranks)
        self._construct(
            loader,
            choice.reader(data_ranks.size, data_ranks.rank, dispatch=True, slice_fn=slice_fn),
            seed=seed,
            rank=data_ranks.rank,
            ranks=data_ranks.size,
            device=state.device,
            non_blocking=_non_blocking,
            restores_position=use_stateful_dataloader,
        )
        self.split_batches, self.rng_types, self.synchronized_generator = split_batches, None, None
        self._take(skip_batches, iteration, _drop_last)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """A loader of one process's part of the data, as `Accelerator.prepare` makes it. Collective.

    Args:
        device: of the batches, if `put_on_device`.
        num_processes, process_index: of this process by default.
        rng_types: no effect: all processes draw one order.
        torch_device_mesh: no effect.
    """
    data_ranks = current().over("data")
    ranks = data_ranks.size if num_processes is None else num_processes
    options = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    loader = prepare_loader(
        dataloader,
        ranks=ranks,
        rank=data_ranks.rank if process_index is None else process_index,
        device=device if put_on_device else None,
        options=options,
        # A number of the script's own is not that of a group, so nothing can be exchanged.
        data_ranks=data_ranks if ranks == data_ranks.size else Gang(),
        start_timeout=start_timeout(os.environ),
        slice_fn=slice_fn_for_dispatch,
    )
    loader.follower = GradientState()
    return loader


class ShardReader(PassthroughReader):
    """The batches of a loader that deals samples to processes itself, with the share of each process."""

    def __init__(self, loader: DataLoader[Any], ranks: int) -> None:
        super().__init__(loader)
        self._dataset, self._batches, self._ranks = loader.dataset, loader.batch_sampler, ranks

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a whole batch over all processes."""
        size: int | None = getattr(self._batches, "batch_size", None)
        return size if size is None or getattr(self._batches, "split_batches", False) else size * self._ranks

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        for dealt in super().read(wanted):
            yield dealt if self._ranks == 1 else replace(dealt, shares=self._shares(dealt))

    def _shares(self, dealt: DealtBatch) -> tuple[int, ...]:
        total = self.total_batch_size
        if total is None:  # batches of several sizes, of which only this process's is known
            return dealt.shares * self._ranks
        own, left = total // self._ranks, 0
        if dealt.last and not getattr(self._batches, "drop_last", False):
            # Not of the dataset: a sampler may have fewer positions than it has samples, or more. If their number is
            # unknown, all rows count.
            positions = getattr(getattr(self._batches, "batch_sampler", None), "sampler", self._dataset)
            left = (known_length(positions) or 0) % total
        return tuple(min(max((left or total) - rank * own, 0), own) for rank in range(self._ranks))


class DataLoaderStateMixin:
    """Base of a script's own loader: `begin` and `end` of a pass, so that an accelerator accumulates up to its end.

    A subclass sets `self.gradient_state = GradientState()`, and `end_of_dataloader` at the last batch.

    Attributes:
        end_of_dataloader: the current batch is the last one of its pass.
        remainder: samples over all ranks of the last, short batch; -1 if unknown.
        samples_here, samples_everywhere: None: how many samples each rank has is unknown.
        is_filler: False: every batch has samples.
    """

    gradient_state: Any
    _drop_last = True  # as in accelerate, a subclass says so if it does not
    total_batch_size: int | None = None
    samples_here = samples_everywhere = None
    is_filler = False
    end_of_dataloader, remainder = False, -1

    def reset(self) -> None:
        """Return to the state before a pass."""
        self.end_of_dataloader, self.remainder = False, -1

    def begin(self) -> None:
        """Call it before the first batch."""
        self.reset()
        dataset: Any = getattr(self, "dataset", None)
        if not self._drop_last and hasattr(dataset, "__len__") and self.total_batch_size:
            self.remainder = getattr(dataset, "total_dataset_length", len(dataset)) % self.total_batch_size
        self.gradient_state.begin(self)

    def end(self) -> None:
        """Call it after the last batch."""
        self.gradient_state.end(self)
