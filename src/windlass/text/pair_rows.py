"""Prepared rows of preferences: a prompt, its answers, and numbers that belong to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.text.summary import TextSummary
from windlass.text.token_rows import LENGTHS, TokenRows

Values = NDArray[Any]
PROMPT = "prompt_ids"


class PairRows(Sequence[Any]):
    """A map-style dataset of rows `{"prompt_ids": list[int], "chosen_ids": list[int], ...}`, with columns of numbers.

    Args:
        rows: whose documents are the prompt and the answers.
        answers: names of the answers, as "chosen".
        numbers: name of a column -> its value for each row of `rows`.
        kept: which rows of `rows` these are, in order; all by default.
    """

    def __init__(
        self,
        rows: TokenRows,
        answers: Sequence[str],
        numbers: Mapping[str, Values] | None = None,
        kept: Values | None = None,
    ) -> None:
        self.rows, self.answers, self.numbers = rows, tuple(answers), dict(numbers or {})
        self.kept = np.arange(len(rows)) if kept is None else kept

    @property
    def column_names(self) -> list[str]:
        """The columns of a row."""
        return [PROMPT, *(f"{name}_ids" for name in self.answers), *self.numbers]

    @property
    def lengths(self) -> Values:
        """Tokens of the prompt and of each answer: int64 [rows, 1 + answers]."""
        return self._all_lengths()[self.kept]

    def _all_lengths(self) -> Values:
        found: Values = self.rows.flat[LENGTHS].reshape(-1, 1 + len(self.answers)).astype(np.int64)
        return found

    def select(self, places: Any) -> PairRows:
        """Return the rows at these places."""
        return PairRows(self.rows, self.answers, self.numbers, self.kept[np.asarray(places, dtype=np.int64)])

    def with_numbers(self, name: str, values: Values) -> PairRows:
        """Return these rows with one more column: `values[i]` belongs to row i."""
        whole = np.zeros(len(self.rows), dtype=values.dtype)
        whole[self.kept] = values
        return PairRows(self.rows, self.answers, {**self.numbers, name: whole}, self.kept)

    def summary(self, most: int | None, dropped: int) -> TextSummary:
        """Count the sequences of a prompt and an answer, cut to `most` tokens."""
        lengths = self.lengths
        sequences = lengths[:, :1] + lengths[:, 1:]
        cut = sequences if most is None else np.minimum(sequences, most)
        trained = np.maximum(cut - lengths[:, :1], 0)
        ids = self.rows.flat["input_ids"]
        return TextSummary(
            rows=len(self),
            tokens=int(cut.sum()),
            trained_tokens=int(trained.sum()),
            truncated=int((sequences > cut).any(axis=1).sum()),
            dropped=dropped,
            longest=int(cut.max()) if len(cut) else 0,
            largest_id=int(ids.max()) if len(ids) else 0,
            histogram=TextSummary.histogram_of(cut.ravel()),
        )

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return [row[index] for row in self]
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        at = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._row(int(self.kept[at]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._row(int(at)) for at in self.kept)

    def _row(self, at: int) -> dict[str, Any]:
        first, last = self.rows.borders("input_ids")[at : at + 2]
        ids = self.rows.flat["input_ids"][first:last]
        width = 1 + len(self.answers)
        ends = np.cumsum(self.rows.flat[LENGTHS][at * width : (at + 1) * width])[:-1]
        parts = [part.tolist() for part in np.split(ids, ends)]
        found: dict[str, Any] = dict(zip(self.column_names, parts, strict=False))
        found.update({name: values[at].item() for name, values in self.numbers.items()})
        return found
