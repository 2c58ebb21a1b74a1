"""The order of an epoch's samples: a function of (seed, epoch), never of ranks, workers or history."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, Sampler

from windlass.config.plan import BatchPlan, DataPlan
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.rng import STREAM_ORDER, derive_seed
from windlass.data.seeding import Sandbox, first_seed, rewind, set_epochs

# By dataset, and in each by (column, tokens, samples).
_cache: weakref.WeakKeyDictionary[Any, dict[tuple[str, str, int], np.ndarray[Any, Any]]] = (
    weakref.WeakKeyDictionary()
)


def sample_lengths(dataset: Any, column: str = "length", tokens: str = "input_ids") -> np.ndarray[Any, Any]:
    """Length of every sample, int64 of shape (samples,): its `column` where it has one, else `len(sample[tokens])`.

    Remembered as long as the dataset object lives and has as many samples, because reading every sample of a large set
    takes minutes. Raises DataError if the samples have neither.
    """
    try:
        known = _cache.setdefault(dataset, {})
    except TypeError:  # lists and the like cannot be remembered, and are quick to read
        known = {}
    key = column, tokens, len(dataset)
    if key not in known:
        known[key] = np.asarray(_measure(dataset, column, tokens), dtype=np.int64)
    return known[key]


def known_length(data: Any) -> int | None:
    """Samples of a dataset, or batches of a loader; None if unknown. A class may have a `__len__` that only some of its
    objects know: `ChainDataset`, which `stream + stream` makes, adds the lengths of its parts.
    """
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


class Measured:
    """A map-style dataset that knows the lengths of its samples, which are not in one column."""

    def sample_lengths(self) -> np.ndarray[Any, Any]:
        """The number of tokens of each sample, in order."""
        raise NotImplementedError


def _measure(dataset: Any, column: str, tokens: str) -> Any:
    if isinstance(dataset, Measured):
        return dataset.sample_lengths()
    columns = getattr(dataset, "column_names", None)
    if columns is not None and hasattr(dataset, "select_columns"):
        if column in columns:
            # Without a format: that of torch would make a tensor of each row.
            return dataset.with_format(None)[column][:]
        if tokens in columns:
            narrow = dataset.with_format(None).select_columns([tokens])
            return [len(ids) for batch in narrow.iter(1000) for ids in batch[tokens]]
    return [_length(dataset[index], index, column, tokens) for index in range(len(dataset))]


def _length(sample: Any, index: int, column: str, tokens: str) -> int:
    if isinstance(sample, Mapping) or hasattr(sample, "keys"):
        if column in sample:
            return int(sample[column])
        if tokens in sample:
            return len(sample[tokens])
    has = (
        f"the columns {sorted(map(str, sample.keys()))}"
        if hasattr(sample, "keys")
        else f"the type {type(sample).__name__}"
    )
    raise DataError(
        f"sample {index} has {has}: its length is neither in {column!r} nor in {tokens!r}. "
        "Name the column that holds it with length_column_name, or use train_sampling_strategy='random'."
    )


logger = get_job_logger(__name__)


class Order(Sampler[int]):
    """A sampler whose whole state is (seed, epoch), and `stretch`. Iterating gives the current epoch's order.

    Attributes:
        stretch: samples that are sorted together by their lengths; 0 if none are.

    Args:
        length: number of samples in an epoch.
        seed: the run's data seed.
    """

    stretch = 0

    def __init__(self, length: int, seed: int) -> None:
        self.seed, self.epoch = seed, 0
        self._length = length
        self._cached: tuple[tuple[int, int, int], np.ndarray[Any, Any]] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self.of(self.epoch).tolist())

    def of(self, epoch: int) -> np.ndarray[Any, Any]:
        """Positions of the samples of `epoch` in their order, int64 of shape (samples,)."""
        key = (self.seed, epoch, self.stretch)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._order(epoch))
        return self._cached[1]

    def repeats(self, epoch: int) -> np.ndarray[Any, Any] | None:
        """How many times the sample at each place of `of(epoch)` came before in it, int64 of its shape; None if each
        comes once.
        """
        return None

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        raise NotImplementedError


class SequentialOrder(Order):
    """The dataset's own order, in each epoch."""

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        return np.arange(self._length, dtype=np.int64)


class RandomOrder(Order):
    """A uniformly random permutation, another one in each epoch."""

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        # Sorting raw 64-bit draws rather than `permutation`: NumPy promises that a bit generator's stream
        # never changes, but not what its distributions make of it; a checkpoint outlives a NumPy version.
        draws = np.random.PCG64(derive_seed(STREAM_ORDER, self.seed, epoch)).random_raw(self._length)
        return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


class LengthGroupedOrder(RandomOrder):
    """Samples of similar length side by side, so that little is padded, in another random order in each epoch.

    A random permutation is cut into stretches of up to 50 updates (at least four stretches where the data
    allows), each sorted by falling length; the longest sample of all comes first, so that running out of
    memory happens at once.

    Args:
        lengths: int64 of shape (samples,).
        batch: samples of one update.
    """

    def __init__(self, lengths: np.ndarray[Any, Any], batch: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths = lengths
        # The size of transformers' `get_length_grouped_indices`.
        self.stretch = max(1, min(self._length // (batch * 4), 50)) * batch

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        order = super()._order(epoch)
        if not len(order):
            return order
        starts = range(0, self._length, self.stretch)
        for start in starts:
            part = order[start : start + self.stretch]
            order[start : start + self.stretch] = part[np.argsort(-self.lengths[part], kind="stable")]
        # Each stretch begins with its longest sample, so the longest of all is the first of one.
        longest = max(starts, key=lambda start: self.lengths[order[start]])
        order[[0, longest]] = order[[longest, 0]]
        return order


class RebalancedOrder(RandomOrder):
    """A random order whose updates are dealt to ranks and micro-batches by padded cost, not by count
    (token-budget batches): by `BalancedRows`.
    """

    def __init__(self, lengths: np.ndarray[Any, Any], seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths = lengths


class SamplerOrder(Order):
    """A user's own sampler, run through once an epoch under generators seeded by (seed, epoch).

    Raises:
        DataError: the sampler shards, yields batches, or yields something else than whole numbers.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise DataError(
                "the sampler is a DistributedSampler, which already keeps the samples of one rank, and "
                "Windlass deals samples to ranks itself. Return a sampler over the whole dataset."
            )
        self.sampler = sampler
        self._generators = own_generators(sampler, *ordering_parts(sampler))
        # The length is known only once the sampler was run through; see `__len__`.
        super().__init__(0, seed)

    def __len__(self) -> int:
        return len(self.of(self.epoch))

    def repeats(self, epoch: int) -> np.ndarray[Any, Any] | None:
        return repeats_in(self.of(epoch))

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        positions = run_sampler(self.sampler, self.seed, epoch, self._generators)
        if any(isinstance(p, (list, tuple)) for p in positions[:1]):
            fix = "return a plain Sampler; batches are cut from its order with per_device_train_batch_size"
            raise DataError(
                f"the sampler {type(self.sampler).__name__} yields batches, not positions: {fix}."
            )
        try:
            return np.fromiter(map(operator.index, positions), dtype=np.int64, count=len(positions))
        except TypeError:
            wrong = next(position for position in positions if not _is_position(position))
            raise DataError(
                f"the sampler {type(self.sampler).__name__} yields {wrong!r} ({type(wrong).__name__}); it must yield "
                "positions (whole numbers)."
            ) from None


def repeats_in(positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """How many times each of `positions` came before in them, int64 of their shape; None if each comes once."""
    # A stable sort keeps equal positions in their order: within a run of them, places are numbered from 0.
    order = np.argsort(positions, kind="stable")
    ranked = positions[order]
    begins = np.append(True, ranked[1:] != ranked[:-1])[: len(ranked)]
    if begins.all():
        return None
    places = np.arange(len(ranked))
    found = np.empty_like(places)
    found[order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return found


def _is_position(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


# A sampler without a length that gives more positions is taken not to end.
_ENDLESS = 10_000_000

Generators = list[tuple[Any, int | None]]


def ordering_parts(loader: Any) -> list[Any]:
    """The sampler and the batch sampler of a loader, and those that they hold themselves: what decides its order."""
    found: list[Any] = []
    pending = [loader]
    while pending:
        holder = pending.pop()
        for part in (getattr(holder, "sampler", None), getattr(holder, "batch_sampler", None)):
            if part is not None and not any(part is known for known in found):
                found.append(part)
                pending.append(part)
    return found


def own_generators(*parts: Any) -> Generators:
    """The generators of samplers (or loaders), each with its first seed."""
    generators = [getattr(part, "generator", None) for part in parts]
    return [(generator, first_seed(generator)) for generator in generators if generator is not None]


def run_sampler(sampler: Any, seed: int, epoch: int, generators: Generators) -> list[Any]:
    """All that a user's sampler or batch sampler yields in `epoch`, a function of (seed, epoch) as far as it draws from
    the default generators or its own `generators`. Raises DataError if it does not end.
    """
    set_epochs(epoch, *ordering_parts(sampler), sampler)
    for generator, first in generators:
        rewind(generator, first, epoch)
    sandbox = Sandbox()
    with sandbox:
        sandbox.seed(derive_seed(STREAM_ORDER, seed, epoch))
        has_end = hasattr(sampler, "__len__")
        drawn = list(sampler if has_end else islice(sampler, _ENDLESS + 1))
    if not has_end and len(drawn) > _ENDLESS:
        raise DataError(
            f"the sampler {type(sampler).__name__} gave {_ENDLESS} positions and did not end. An epoch's order is "
            "drawn at once: let it end, and give it a __len__."
        )
    return drawn


def build_order(dataset: Any, plan: DataPlan, batch: BatchPlan, measured: Any = None) -> Order:
    """The sampler that `plan.order` names, for a map-style `dataset`.

    `measured` is the same dataset with all its columns: `dataset` may have lost the one that holds lengths. Raises
    DataError if the dataset has no length, or lengths were asked for that it does not have.
    """
    if plan.order == "sequential":
        return SequentialOrder(len(dataset), plan.seed)
    if plan.order == "random":
        return RandomOrder(len(dataset), plan.seed)
    lengths = sample_lengths(dataset if measured is None else measured, plan.length_column)
    if len(lengths) and (lengths == lengths[0]).all():
        logger.warning(
            f"train_sampling_strategy={plan.order!r}: all {len(lengths)} samples have the length {lengths[0]}, so "
            f"it does nothing. Is {plan.length_column!r} right, and are the samples padded too early?"
        )
    if plan.order == "group_by_length":
        return LengthGroupedOrder(lengths, batch.update, plan.seed)
    return RebalancedOrder(lengths, plan.seed)


def refuse_order_of_stream(plan: DataPlan) -> None:
    """Raise if the plan has an order that needs all samples beforehand. Raises ConfigError, which names the field and
    what to use.
    """
    if plan.order in ("group_by_length", "batch_rebalance"):
        fix = "an iterable dataset comes in its own order; use 'random', or a dataset with __getitem__ and __len__"
        raise ConfigError(Problem("train_sampling_strategy", plan.order, fix))


def as_order(sampler: Any, seed: int) -> Order:
    """`sampler` itself if it is an `Order`, else wrapped."""
    return sampler if isinstance(sampler, Order) else SamplerOrder(sampler, seed)
