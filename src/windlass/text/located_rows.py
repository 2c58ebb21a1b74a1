"""Rows that know where they came from, so that an error names the line of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from windlass.core.errors import DataError


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
