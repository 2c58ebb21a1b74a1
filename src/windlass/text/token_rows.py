"""Prepared rows in memory or in mapped files: three flat arrays rather than a list of lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.text.encoder import EncodedRows

COLUMNS = ("input_ids", "labels")
LENGTHS, PLACES = "seq_lengths", "places"
Ints = NDArray[Any]


class TokenRows(Sequence[Any]):
    """A map-style dataset of rows `{"input_ids": list[int], "labels": list[int]}`, packed ones with "seq_lengths".

    A slice or a column name returns lists of rows, as those of a `datasets.Dataset` do.

    Args:
        input_ids: int32 [tokens], of all rows.
        labels: int32 [tokens]; -100 = not trained.
        offsets: int64 [rows + 1]: row i has the tokens from `offsets[i]` up to `offsets[i + 1]`.
        seq_lengths: of packed rows, the tokens of each document: int32 [documents].
        documents: of packed rows, int64 [rows + 1]: row i has the documents from `documents[i]` up to
            `documents[i + 1]`.
        places: of rows with images, two numbers for each document: its row in the dataset, and how many of that row's
            images it has. int64 [2 * documents].
    """

    def __init__(
        self,
        input_ids: Ints,
        labels: Ints,
        offsets: Ints,
        seq_lengths: Ints | None = None,
        documents: Ints | None = None,
        places: Ints | None = None,
    ) -> None:
        # One flat array for a column: a list has 8 bytes of pointer and 28 of object for a token of 4 bytes, and forked
        # workers would copy it page by page as they count references.
        self.flat = {"input_ids": input_ids, "labels": labels}
        if seq_lengths is not None:
            self.flat[LENGTHS] = seq_lengths
        if places is not None:
            self.flat[PLACES] = places
        self.offsets, self.documents = offsets, documents

    @classmethod
    def of(cls, parts: Iterable[EncodedRows]) -> TokenRows:
        ids, labels, lengths = [], [], [0]
        documents: list[list[int]] = []
        places: list[int] = []
        for part in parts:
            documents += part.documents
            places += part.places
            ids.append(_flat(part.input_ids))
            labels.append(_flat(part.labels))
            lengths += map(len, part.input_ids)
        empty = np.empty(0, dtype=np.int32)
        return cls(
            np.concatenate([empty, *ids]),
            np.concatenate([empty, *labels]),
            np.cumsum(lengths, dtype=np.int64),
            _flat(documents) if documents else None,
            np.cumsum([0, *map(len, documents)], dtype=np.int64) if documents else None,
            np.array(places, dtype=np.int64) if places else None,
        )

    @classmethod
    def joined(cls, parts: Sequence[TokenRows]) -> TokenRows:
        """Return the rows of all parts, which all are packed or all are not."""
        if len(parts) == 1:
            return parts[0]
        # A part without rows has not the columns that packing or images add.
        parts = [part for part in parts if len(part)] or parts[:1]
        flat = {name: np.concatenate([part.flat[name] for part in parts]) for name in parts[0].flat}
        borders = {name: _joined([np.diff(part.borders(name)) for part in parts]) for name in flat}
        return cls(
            flat["input_ids"],
            flat["labels"],
            borders["input_ids"],
            flat.get(LENGTHS),
            borders.get(LENGTHS),
            flat.get(PLACES),
        )

    def arrays(self) -> dict[str, Ints]:
        """Return what the constructor was given."""
        return {**self.flat, "offsets": self.offsets} | (
            {} if self.documents is None else {"documents": self.documents}
        )

    def borders(self, name: str) -> Ints:
        """Where the rows begin in a flat column, and the end of the last one: int64 [rows + 1]."""
        # Columns of tokens share their borders; of the others a row has a value or two for each document.
        if name not in (LENGTHS, PLACES):
            return self.offsets
        documents = np.arange(len(self) + 1) if self.documents is None else self.documents
        return 2 * documents if name == PLACES else documents

    @property
    def column_names(self) -> list[str]:
        """The columns of a row."""
        return list(self.flat)

    @property
    def lengths(self) -> Ints:
        """Tokens of each row: int64 [rows]."""
        return np.diff(self.offsets)

    def shuffle(self, seed: int) -> TokenRows:
        """Return the rows in the order that `datasets.Dataset.shuffle` gives them for this seed."""
        order = np.random.default_rng(seed).permutation(len(self))
        found = {name: _taken(values, self.borders(name), order) for name, values in self.flat.items()}
        (ids, offsets), (labels, _) = found["input_ids"], found["labels"]
        lengths, documents = found.get(LENGTHS, (None, None))
        return TokenRows(ids, labels, offsets, lengths, documents, found.get(PLACES, (None,))[0])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return self._column(index, range(len(self)))
        if isinstance(index, slice):
            rows = range(*index.indices(len(self)))
            return {name: self._column(name, rows) for name in self.flat}
        at = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return {name: self._column(name, range(at, at + 1))[0] for name in self.flat}

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for at in range(len(self)):
            yield self[at]

    def _column(self, name: str, rows: range) -> list[list[int]]:
        flat, borders = self.flat[name], self.borders(name)
        return [flat[borders[at] : borders[at + 1]].tolist() for at in rows]


def _taken(values: Ints, borders: Ints, order: Ints) -> tuple[Ints, Ints]:
    """The values of the rows `order`, and the borders of these rows."""
    lengths = np.diff(borders)[order]
    ends = np.cumsum(lengths)
    take = np.repeat(borders[order] - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
    return values[take], np.append(0, ends)


def _joined(lengths: Sequence[Ints]) -> Ints:
    return np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)


def _flat(rows: list[list[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=sum(map(len, rows)))
