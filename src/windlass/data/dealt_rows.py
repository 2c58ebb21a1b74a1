"""Which samples make the batches of a pass, over all ranks: cut from an order, or taken from a batch sampler.

Samples are divided between ranks in contiguous runs whose sizes differ by one at most, larger ones first; for
token-budget batches so that every micro-batch of an update costs about the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from windlass.core.errors import DataError
from windlass.data.batch_reader import DealtBatch
from windlass.data.order import (
    Order,
    RebalancedOrder,
    ordering_parts,
    own_generators,
    repeats_in,
    run_sampler,
)

# Rows whose positions are converted from an order's array at once: each conversion costs as much as reading a row.
_ROWS_AT_ONCE = 64
_QUADRATIC = 0.001  # cost of attention, relative to the rest of a model


def batch_of(
    parts: list[list[int]], rank: int, end: int, last: bool, repeats: list[list[int]] | None = None
) -> DealtBatch:
    """What `rank` is to read of one batch of every rank: a batch without its data.

    Args:
        parts: positions of each rank's samples in the dataset; empty lists for ranks without any.
        end: position of the pass after this batch.
        last: no batch follows.
        repeats: how many times each of these samples came before in the pass; None if none did.
    """
    source = rank if parts[rank] else next(other for other, part in enumerate(parts) if part)
    some = slice(None) if source == rank else slice(1)
    again = [] if repeats is None else repeats[source][some]
    shares = tuple(map(len, parts))
    return DealtBatch(None, shares, end, last, parts[source][some], repeats=again, filler=source != rank)


class SampleRows:
    """Rows of `size` samples cut from an order; positions count samples, so that the size may change on resume.

    Only the last row can be short. It is divided evenly, so that as many ranks as possible have work.
    """

    unit = "samples"

    def __init__(self, order: Order, size: int, ranks: int, drop_last: bool) -> None:
        self._order, self.total_batch_size, self._ranks, self._drop_last = order, size, ranks, drop_last

    def batches(self, epoch: int, start: int, rank: int) -> Iterator[DealtBatch]:
        order, length, size = self._order.of(epoch), self.length(epoch), self.total_batch_size
        shares, (low, high) = shares_of(size, self._ranks), share(size, self._ranks, rank)
        repeats = self._order.repeats(epoch)
        for first in range(start, length, size * _ROWS_AT_ONCE):
            stretch = slice(first, min(first + size * _ROWS_AT_ONCE, length))
            ids = order[stretch].tolist()
            again = [] if repeats is None else repeats[stretch].tolist()
            for begin in range(0, len(ids), size):
                row, end = ids[begin : begin + size], min(first + begin + size, length)
                if len(row) < size:  # the last one
                    shares, (low, high) = shares_of(len(row), self._ranks), share(len(row), self._ranks, rank)
                own = slice(low, high) if high > low else slice(1)
                before = again[begin : begin + size][own]
                yield DealtBatch(
                    None, shares, end, end == length, row[own], repeats=before, filler=high == low
                )

    def count(self, epoch: int, start: int = 0) -> int:
        return max(-(-(self.length(epoch) - start) // self.total_batch_size), 0)

    def position(self, epoch: int, rows: int) -> int:
        return min(rows * self.total_batch_size, self.length(epoch))

    def reseed(self, seed: int) -> None:
        self._order.seed = seed

    def length(self, epoch: int) -> int:
        """Samples of a pass."""
        count = len(self._order.of(epoch))
        return count - count % self.total_batch_size if self._drop_last else count


class BalancedRows(SampleRows):
    """Rows of an order whose updates, of `update` rows each, are dealt to ranks and micro-batches by padded cost."""

    def __init__(self, order: RebalancedOrder, size: int, ranks: int, drop_last: bool, update: int) -> None:
        super().__init__(order, size, ranks, drop_last)
        self._lengths, self._update = order.lengths, update

    def batches(self, epoch: int, start: int, rank: int) -> Iterator[DealtBatch]:
        order, length, size = self._order.of(epoch), self.length(epoch), self.total_batch_size
        for begin in range(start, length, size * self._update):
            ids = order[begin : min(begin + size * self._update, length)].tolist()
            end, rows = begin, -(-len(ids) // size)
            for parts in balanced_batches(ids, self._lengths[ids].tolist(), rows, self._ranks):
                end += sum(map(len, parts))
                yield batch_of(parts, rank, end, end == length)


class BatchRows:
    """Rows made of a batch sampler's batches: one for each rank, or (`split`) one divided between all ranks.

    The batches that remain at the end are divided sample by sample, or dropped if the batch sampler has `drop_last`.
    Positions count the batch sampler's batches.

    Args:
        sampler: yields lists of positions; iterated once per pass, under generators seeded by (seed, epoch).
    """

    unit = "batches"

    def __init__(self, sampler: Any, seed: int, ranks: int, split: bool) -> None:
        self._sampler, self._seed, self._ranks = sampler, seed, ranks
        self._per_row = 1 if split else ranks
        self._split = split
        self._drop_last = bool(getattr(sampler, "drop_last", False))
        size = getattr(sampler, "batch_size", None)
        self.total_batch_size = None if size is None else int(size) * self._per_row
        self._generators = own_generators(sampler, *ordering_parts(sampler))
        self._cached: tuple[tuple[int, int], list[list[int]]] | None = None

    def batches(self, epoch: int, start: int, rank: int) -> Iterator[DealtBatch]:
        batches, step = self.of(epoch), self._per_row
        repeats = _repeats_of(batches)
        for begin in range(start, len(batches), step):
            end = min(begin + step, len(batches))
            again = None if repeats is None else self._parts(repeats[begin:end])
            yield batch_of(self._parts(batches[begin:end]), rank, end, end == len(batches), again)

    def count(self, epoch: int, start: int = 0) -> int:
        return max(-(-(len(self.of(epoch)) - start) // self._per_row), 0)

    def position(self, epoch: int, rows: int) -> int:
        return min(rows * self._per_row, len(self.of(epoch)))

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def _parts(self, batches: list[list[int]]) -> list[list[int]]:
        if len(batches) == self._ranks and not self._split:
            return batches
        return dealt([position for batch in batches for position in batch], self._ranks)

    def of(self, epoch: int) -> list[list[int]]:
        """All batches of a pass, over all ranks."""
        key = (self._seed, epoch)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._drawn(epoch))
        return self._cached[1]

    def _drawn(self, epoch: int) -> list[list[int]]:
        drawn = run_sampler(self._sampler, self._seed, epoch, self._generators)
        batches = [_positions(batch, self._sampler) for batch in drawn]
        if self._drop_last:
            del batches[len(batches) - len(batches) % self._per_row :]
        return batches


def _repeats_of(batches: list[list[int]]) -> list[list[int]] | None:
    """How many times each sample came before in the batches of a pass, in their form; None if each comes once."""
    found = repeats_in(np.array([position for batch in batches for position in batch], dtype=np.int64))
    if found is None:
        return None
    flat = iter(found.tolist())
    return [list(islice(flat, len(batch))) for batch in batches]


Rows = SampleRows | BatchRows
"""The rows of a pass, from any position on."""


def _positions(batch: Any, sampler: Any) -> list[int]:
    try:
        positions = [position.__index__() for position in batch]
    except (TypeError, AttributeError):
        positions = []
    if not positions:
        raise DataError(
            f"the batch sampler {type(sampler).__name__} gave {batch!r}; it must yield lists of positions (whole "
            "numbers), none of them empty."
        )
    return positions


# --- dividing samples between ranks -----------------------------------------------------------------------------------


def share(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """The half-open range of `count` items that `rank` of `ranks` gets."""
    base, extra = divmod(count, ranks)
    low = rank * base + min(rank, extra)
    return low, low + base + (rank < extra)


def shares_of(count: int, ranks: int) -> tuple[int, ...]:
    """How many of `count` items each rank gets."""
    base, extra = divmod(count, ranks)
    return tuple(base + (rank < extra) for rank in range(ranks))


def dealt(ids: list[int], ranks: int) -> list[list[int]]:
    """The runs of `ids` that the ranks get."""
    if ranks == 1:
        return [ids]
    return [ids[low:high] for low, high in (share(len(ids), ranks, rank) for rank in range(ranks))]


def balanced_batches(ids: list[int], lengths: list[int], rows: int, ranks: int) -> list[list[list[int]]]:
    """Deal `ids` into `rows` micro-batches for each of `ranks` ranks, minimising the largest cost.

    The cost of a padded micro-batch of b samples, the longest of n tokens, is b * (n + 0.001 * n^2), where the second
    term is attention's.

    Samples are sorted by falling length and cut into contiguous groups; the cheapest cut under a cost limit
    is greedy, and the smallest feasible limit is found by bisection. Groups are dealt by falling cost: the
    `ranks` most expensive ones make row 0, so that the ranks of one row cost alike.

    Returns:
        `rows` lists of `ranks` lists of ids; empty lists only if there are fewer samples than `rows * ranks`.
    """
    by_length = sorted(zip(lengths, ids, strict=True), key=lambda pair: -pair[0])
    costs = [n + _QUADRATIC * n * n for n, _ in by_length]
    sizes = _sizes(costs, rows * ranks)
    groups, start = [], 0
    for size in sizes:
        price = size * costs[start] if size else 0.0
        groups.append((price, [i for _, i in by_length[start : start + size]]))
        start += size
    groups.sort(key=lambda group: -group[0])
    return [[members for _, members in groups[row * ranks : (row + 1) * ranks]] for row in range(rows)]


def _sizes(costs: list[float], count: int) -> list[int]:
    """Sizes of `count` contiguous groups over samples of falling `costs`, with the smallest possible largest cost."""
    if len(costs) <= count:
        return [1] * len(costs) + [0] * (count - len(costs))
    even = [share(len(costs), count, group) for group in range(count)]
    # No limit below the costliest sample is feasible, and that of the even cut is.
    low, high = costs[0], max((end - start) * costs[start] for start, end in even)
    for _ in range(40):  # halvings: the limit is exact to 1e-12 of its first range
        limit = (low + high) / 2
        if _greedy(costs, limit, count) is None:
            low = limit
        else:
            high = limit
    # `int(limit / cost)` may round the even cut's own limit down to one sample less.
    sizes = _greedy(costs, high, count) or [end - start for start, end in even]
    while len(sizes) < count:  # a limit may need fewer groups; every rank must have work
        widest = max(range(len(sizes)), key=sizes.__getitem__)
        half = sizes[widest] // 2
        sizes[widest : widest + 1] = [sizes[widest] - half, half]
    return sizes


def _greedy(costs: list[float], limit: float, count: int) -> list[int] | None:
    """Fill each group up to `limit`; None if more than `count` groups are needed."""
    sizes: list[int] = []
    start = 0
    while start < len(costs):
        if len(sizes) == count:
            return None
        # The first sample of a group is its longest, by which all of it is padded.
        size = len(costs) - start if costs[start] == 0 else min(int(limit / costs[start]), len(costs) - start)
        if size == 0:
            return None
        sizes.append(size)
        start += size
    return sizes
