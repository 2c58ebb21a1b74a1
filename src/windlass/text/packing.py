"""Packing: several documents in one row, so that little or nothing is padded.

A packed row holds its documents one after the other; `seq_lengths` holds their lengths, from which a collator makes
position ids and an attention keeps documents apart.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.text.packed_stream import PackedStream
from windlass.text.tables import of_any_length
from windlass.text.text_options import STRATEGIES
from windlass.text.token_rows import COLUMNS, PLACES, TokenRows

Array = np.ndarray[Any, Any]


def best_fit_decreasing(lengths: Any, capacity: int) -> tuple[Array, Array]:
    """Pack documents into as few rows of `capacity` tokens as best-fit-decreasing needs.

    The longest document comes first, and each goes into the fullest row in which it fits; among rows of equal space,
    and among documents of equal length, the older one comes first. Documents of one length are placed together, so
    the time is that of a sort plus one step for each pair of a length and a space that meet.

    Args:
        lengths: tokens of each document, shape (documents,), each from 1 to `capacity`.

    Returns:
        `order`, int64 of shape (documents,): the documents in the order of the packed rows; and `starts`, int64 of
        shape (rows + 1,): row r holds the documents `order[starts[r]:starts[r + 1]]`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(
            f"lengths must be from 1 to {capacity}, and are from {lengths.min()} to {lengths.max()}"
        )
    longest_first = np.argsort(-lengths, kind="stable")
    ordered = lengths[longest_first]
    # Where a run of documents of equal length begins.
    borders = np.append(np.flatnonzero(np.diff(ordered, prepend=-1)), len(lengths))
    rows_of = np.empty(len(lengths), dtype=np.int64)
    rows = _Rows(capacity)
    for begin, end in pairwise(borders.tolist()):
        rows.place(rows_of[begin:end], int(ordered[begin]))
    by_row = np.argsort(rows_of, kind="stable")
    starts = np.searchsorted(rows_of[by_row], np.arange(rows.count + 1))
    return longest_first[by_row], starts.astype(np.int64)


class _Rows:
    """Open rows by the space that is left in them, oldest first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._spaces: list[int] = []  # those that some row has, rising
        self._with_space: dict[int, deque[Array]] = {}
        self.count = 0

    def place(self, places: Array, length: int) -> None:
        """Write the rows of `len(places)` documents of one `length` into `places`."""
        done = 0
        while done < len(places):
            at = bisect_left(self._spaces, length)
            if at < len(self._spaces):
                space = self._spaces[at]
                rows = self._take(at, -(-(len(places) - done) // (space // length)))
            else:
                space = self._capacity
                fresh = -(-(len(places) - done) // (space // length))
                rows = np.arange(self.count, self.count + fresh)
                self.count += fresh
            done += self._fill(places[done:], rows, space, length)

    def _fill(self, places: Array, rows: Array, space: int, length: int) -> int:
        """Fill each of `rows` before the next one. Return the number of documents placed."""
        each = space // length
        placed = min(len(rows) * each, len(places))
        places[:placed] = np.repeat(rows, each)[:placed]
        in_last = placed - (len(rows) - 1) * each
        self._put(rows[:-1], space - each * length)
        self._put(rows[-1:], space - in_last * length)
        return placed

    def _take(self, at: int, wanted: int) -> Array:
        """Up to `wanted` of the oldest rows with the space at index `at`."""
        queue = self._with_space[self._spaces[at]]
        rows = queue.popleft()
        if len(rows) > wanted:
            queue.appendleft(rows[wanted:])
        elif not queue:
            del self._with_space[self._spaces.pop(at)]
        return rows[:wanted]

    def _put(self, rows: Array, space: int) -> None:
        if not space or not len(rows):
            return
        if space not in self._with_space:
            self._with_space[space] = deque()
            insort(self._spaces, space)
        self._with_space[space].append(rows)


def pack_dataset(
    dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: dict[str, Any] | None = None
) -> Any:
    """Pack the rows of a dataset into rows of up to `seq_length` tokens.

    Args:
        dataset: a `Dataset`, `DatasetDict` or `IterableDataset` of the `datasets` package, or a list of mappings; every
            column holds one list per row, all of a row of one length. Any other iterable becomes a `PackedStream`.
        strategy: "bfd" (best fit, longest first; what is longer than `seq_length` is cut), "bfd_split" (longer rows
            become pieces of `seq_length` and a rest), "wrapped" (all rows one after the other, cut every `seq_length`
            tokens).
        map_kwargs: options of the dataset's `map`; `batch_size` is the number of rows that are packed together (1000;
            None: all).

    Returns:
        A dataset of the same kind and format. With "bfd" and "bfd_split" it has the column `seq_lengths`.

    Raises:
        ValueError: an unknown strategy, a `seq_length` below 1, or columns whose lists differ in length.
        TypeError: a column does not hold lists.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(Problem("strategy", strategy, f"use one of {', '.join(STRATEGIES)}"))
    if not isinstance(seq_length, Integral) or seq_length < 1:
        raise ConfigError(Problem("seq_length", seq_length, "use a whole number of at least 1"))
    if not isinstance(map_kwargs, Mapping | None):
        raise ConfigError(Problem("map_kwargs", map_kwargs, "use a map of options"))
    if isinstance(dataset, str) or not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise ConfigError(Problem("dataset", dataset, "use a dataset, or a list of mappings"))
    if hasattr(dataset, "map") and hasattr(dataset, "with_format"):
        return _packed_by_map(dataset, seq_length, strategy, map_kwargs or {})
    if map_kwargs:
        raise ConfigError(
            Problem("map_kwargs", map_kwargs, f"{type(dataset).__name__} has no map; leave it out")
        )
    if isinstance(dataset, Sequence):
        packed = pack_columns(_columns_of(dataset), seq_length, strategy) if len(dataset) else {}
        return [
            dict(zip(packed, row, strict=True)) for row in zip(*map(_as_lists, packed.values()), strict=True)
        ]
    return PackedStream(dataset, seq_length, strategy)


def pack_rows(rows: TokenRows, seq_length: int, strategy: str, group: int = 1000) -> TokenRows:
    """`pack_dataset` for prepared rows: those that it makes of a `datasets.Dataset` of them. Rows with images keep them
    with "bfd" alone, which joins whole rows if none is longer than `seq_length`.
    """
    parts = []
    for first in range(0, len(rows), group):
        borders = rows.offsets[first : first + group + 1]
        span = slice(int(borders[0]), int(borders[-1]))
        columns = {name: (rows.flat[name][span], borders - borders[0]) for name in COLUMNS}
        packed = pack_columns(columns, seq_length, strategy)
        (ids, offsets), (labels, _) = packed["input_ids"], packed["labels"]
        lengths, documents = packed.get("seq_lengths", (None, None))
        sizes = None if lengths is None else lengths.astype(np.int32)
        places = None
        if PLACES in rows.flat:
            order, _ = best_fit_decreasing(np.diff(borders), seq_length)
            places = rows.flat[PLACES].reshape(-1, 2)[first : first + group][order].reshape(-1)
        parts.append(TokenRows(ids, labels, offsets, sizes, documents, places))
    return TokenRows.joined(parts) if parts else rows


Flat = tuple[Array, Array]
"""A column of lists: all values one after the other, and the rows' borders (int64, rows + 1)."""


def pack_columns(columns: Mapping[str, Flat], seq_length: int, strategy: str) -> dict[str, Flat]:
    """`pack_dataset` for columns that lie in memory."""
    borders = next(iter(columns.values()))[1]
    take, packed_borders, lengths = _arrange(borders, seq_length, strategy)
    packed = {
        name: (values if take is None else values[take], packed_borders)
        for name, (values, _) in columns.items()
    }
    return packed if lengths is None else {**packed, "seq_lengths": lengths}


def _arrange(borders: Array, seq_length: int, strategy: str) -> tuple[Array | None, Array, Flat | None]:
    """Which tokens go where: their positions (None: all as they are), the borders of packed rows, and `seq_lengths`."""
    total = int(borders[-1])
    if strategy == "wrapped":
        return None, np.append(np.arange(0, total, seq_length), total), None
    starts, lengths = borders[:-1], np.diff(borders)
    if strategy == "bfd":
        lengths = np.minimum(lengths, seq_length)
    else:
        starts, lengths = _pieces(starts, lengths, seq_length)
    # An empty document would be one more in `seq_lengths`, without a token.
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    order, rows = best_fit_decreasing(lengths, seq_length)
    starts, lengths = starts[order], lengths[order]
    ends = np.cumsum(lengths)
    # For each document, its tokens in the flat column, written as a shift of the positions in the packed one: no loop.
    take = np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())
    return take, np.append(0, ends)[rows], (lengths, rows)


def _pieces(starts: Array, lengths: Array, seq_length: int) -> tuple[Array, Array]:
    """Rows as pieces of `seq_length` and a rest."""
    counts = -(-lengths // seq_length)
    offset = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_length
    return np.repeat(starts, counts) + offset, np.minimum(np.repeat(lengths, counts) - offset, seq_length)


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Flat]:
    """The columns of a list of mappings."""
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            found, first = (", ".join(one) for one in (row, rows[0]))
            raise DataError(
                f"row {number} has the columns {found}, and row 0 has {first}: give all rows the same"
            )
    columns: dict[str, Flat] = {}
    for name in rows[0]:
        borders = np.cumsum([0, *(_row_length(row, name) for row in rows)])
        # without empty rows: NumPy takes an empty list for one of floats
        filled = [np.asarray(row[name]) for row in rows if len(row[name])] or [np.empty(0, dtype=np.int64)]
        columns[name] = np.concatenate(filled), borders
    _refuse_unequal(columns)
    return columns


def _row_length(row: Mapping[str, Any], name: str) -> int:
    if isinstance(row[name], str | bytes) or not hasattr(row[name], "__len__"):
        raise _not_lists(name, type(row[name]).__name__)
    return len(row[name])


def _refuse_unequal(columns: Mapping[str, Flat]) -> None:
    (first, (_, borders)), *others = columns.items()
    lengths = np.diff(borders)
    for name, (_, other) in others:
        if not np.array_equal(other, borders):
            row = int(np.flatnonzero(np.diff(other) != lengths)[0])
            raise ValueError(
                f"row {row} has {lengths[row]} values in {first!r} and {np.diff(other)[row]} in {name!r}: columns that "
                "are packed together must have one value for each token. Remove the other columns first."
            )


def _not_lists(name: str, found: str) -> TypeError:
    return TypeError(f"column {name!r} holds {found}, and only lists can be packed: remove the column first")


def _as_lists(column: Flat) -> Iterable[Any]:
    values, borders = column
    whole = values.tolist()
    return [whole[begin:end] for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)]


def _packed_by_map(dataset: Any, seq_length: int, strategy: str, map_kwargs: dict[str, Any]) -> Any:
    if isinstance(dataset, Mapping):
        kind: Any = type(dataset)
        parts = dataset.items()
        return kind({name: _packed_by_map(part, seq_length, strategy, map_kwargs) for name, part in parts})
    options = {"seq_length": seq_length, "strategy": strategy}
    packed = dataset.with_format("arrow").map(_pack_table, batched=True, fn_kwargs=options, **map_kwargs)
    if not hasattr(dataset, "format"):  # a stream
        return packed.with_format(getattr(getattr(dataset, "_formatting", None), "format_type", None))
    form = dict(dataset.format)
    # `map` leaves a dataset without rows as it is.
    if "seq_lengths" in packed.column_names:
        form["columns"] = [*form["columns"], "seq_lengths"]
    return packed.with_format(**form.pop("format_kwargs"), **form)


def _pack_table(table: Any, seq_length: int, strategy: str) -> Any:
    """Pack an Arrow table, of which only its own methods are used."""
    arrays = {name: of_any_length(table.column(name).combine_chunks()) for name in table.column_names}
    columns: dict[str, Flat] = {}
    for name, array in arrays.items():
        if not hasattr(array, "value_lengths"):
            raise _not_lists(name, f"values of type {array.type}")
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        # `flatten` and not `values`: a slice of a table shares the values of the whole.
        columns[name] = array.flatten(), np.append(0, np.cumsum(lengths, dtype=np.int64))
    _refuse_unequal(columns)
    take, borders, seq_lengths = _arrange(next(iter(columns.values()))[1], seq_length, strategy)
    packed = {
        name: _list_array(arrays[name], borders, values if take is None else values.take(take))
        for name, (values, _) in columns.items()
    }
    if seq_lengths is not None:
        values, borders = seq_lengths
        packed["seq_lengths"] = _list_array(next(iter(arrays.values())), borders, values.astype(np.int32))
    return type(table).from_pydict(packed)


def _list_array(like: Any, borders: Array, values: Any) -> Any:
    """An Arrow list array of the type of `like`."""
    return type(like).from_arrays(borders.astype(like.offsets.type.to_pandas_dtype()), values)
