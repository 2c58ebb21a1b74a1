"""Prepared rows in memory or in mapped files: three flat arrays rather than a list of lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.text.encoder import EncodedRows

COLUMNS = ("input_ids", "labels")
Ints = NDArray[Any]


class TokenRows(Sequence[Any]):
    """A map-style dataset of rows `{"input_ids": list[int], "labels": list[int]}`.

    A slice or a column name returns lists of rows, as those of a `datasets.Dataset` do.

    Args:
        input_ids: int32 [tokens], of all rows.
        labels: int32 [tokens]; -100 = not trained.
        offsets: int64 [rows + 1]: row i has the tokens from `offsets[i]` up to `offsets[i + 1]`.
    """

    def __init__(self, input_ids: Ints, labels: Ints, offsets: Ints) -> None:
        self.flat = {"input_ids": input_ids, "labels": labels}
        self.offsets = offsets

    @classmethod
    def of(cls, parts: Iterable[EncodedRows]) -> TokenRows:
        """Join encoded rows."""
        ids, labels, lengths = [], [], [0]
        for part in parts:
            ids.append(_flat(part.input_ids))
            labels.append(_flat(part.labels))
            lengths += map(len, part.input_ids)
        empty = np.empty(0, dtype=np.int32)
        return cls(
            np.concatenate([empty, *ids]),
            np.concatenate([empty, *labels]),
            np.cumsum(lengths, dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[TokenRows]) -> TokenRows:
        """Return the rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        flat = [np.concatenate([part.flat[name] for part in parts]) for name in COLUMNS]
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(flat[0], flat[1], np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    @property
    def column_names(self) -> list[str]:
        """The columns of a row."""
        return list(COLUMNS)

    @property
    def lengths(self) -> Ints:
        """Tokens of each row: int64 [rows]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return self._column(index, range(len(self)))
        if isinstance(index, slice):
            rows = range(*index.indices(len(self)))
            return {name: self._column(name, rows) for name in COLUMNS}
        at = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, end = self.offsets[at : at + 2]
        return {name: self.flat[name][start:end].tolist() for name in COLUMNS}

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for at in range(len(self)):
            yield self[at]

    def _column(self, name: str, rows: range) -> list[list[int]]:
        flat, offsets = self.flat[name], self.offsets
        return [flat[offsets[at] : offsets[at + 1]].tolist() for at in rows]


def _flat(rows: list[list[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=sum(map(len, rows)))
