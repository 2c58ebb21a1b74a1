"""Rows that know where they came from, so that an error names the line of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windlass.core.errors import DataError

SHOWN = 8
"""Rows that a message names."""


class RowError(DataError):
    """A row that cannot be prepared.

    Attributes:
        row: its number in the dataset, from 0.
        problem: the message without the row.
    """

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row}: {problem}")
        self.row, self.problem = row, problem

    def located(self, dataset: Any) -> DataError:
        """The error with the origin of the row, if the dataset knows it."""
        if not isinstance(dataset, LocatedRows):
            return self
        return DataError(f"{dataset.places[self.row]}: {self.problem}")


class LocatedRows(list[Mapping[str, Any]]):
    """A list of rows. `places` has the origin of each, such as a file and a line."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], places: Iterable[str]) -> None:
        super().__init__(rows)
        self.places = list(places)


def place_of(dataset: Any, row: int) -> str:
    """Where a row of a dataset came from; its number, if the dataset does not know."""
    return dataset.places[row] if isinstance(dataset, LocatedRows) else f"row {row}"


def shown_places(dataset: Any, rows: Sequence[int], total: int) -> str:
    """The places of the first rows, and how many more there are of `total`."""
    shown = ", ".join(place_of(dataset, int(row)) for row in rows[:SHOWN])
    more = total - min(len(rows), SHOWN)
    return f"{shown} and {more} more" if more and shown else shown
