"""What a preparation did: rows, tokens, what was truncated and dropped, and how long the rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from windlass.core.types import IGNORED
from windlass.text.forms import SHOWN
from windlass.text.token_rows import TokenRows

_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class TextSummary:
    """Counts of a prepared dataset."""

    rows: int  # rows that were kept
    tokens: int  # of these rows
    trained_tokens: int  # tokens with a label
    truncated: int  # rows that were cut to the maximum length
    dropped: int  # rows that were left out, because none of their tokens had a label
    longest: int  # tokens of the longest row
    largest_id: int  # the largest token or label, which the embedding of a model must have
    # (lower bound, rows) of ranges of lengths; a range ends where the next one begins, at twice its lower bound
    histogram: tuple[tuple[int, int], ...]
    packed_rows: int | None = None  # rows that these were packed into; None = they were not packed
    dropped_rows: tuple[int, ...] = ()  # numbers in the dataset of the first rows that were left out
    longest_row: int | None = None  # number in the dataset of the longest row
    # The most tokens of a row before its first label, and the number of that row
    longest_prompt: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, rows: TokenRows, truncated: int, dropped: Sequence[int] = ()) -> TextSummary:
        """Count prepared rows. `dropped`: numbers in the dataset of the rows that are not among them."""
        lengths = rows.lengths
        trained = int(np.count_nonzero(rows.flat["labels"] != IGNORED))
        longest = int(lengths.max()) if len(lengths) else 0
        largest = max(
            (int(rows.flat[name].max()) for name in ("input_ids", "labels") if rows.flat[name].size),
            default=0,
        )
        counts = cls.histogram_of(lengths)
        numbers = np.delete(np.arange(len(rows) + len(dropped)), dropped)
        prompt, prompt_row = _longest_prompt(rows)
        return cls(
            len(rows),
            int(lengths.sum()),
            trained,
            truncated,
            len(dropped),
            longest,
            largest,
            counts,
            dropped_rows=tuple(dropped[:SHOWN]),
            longest_row=int(numbers[lengths.argmax()]) if len(lengths) else None,
            longest_prompt=(prompt, int(numbers[prompt_row])) if len(lengths) else (0, 0),
        )

    @staticmethod
    def histogram_of(lengths: Any) -> tuple[tuple[int, int], ...]:
        """Count lengths by the largest power of two in each."""
        if not len(lengths):
            return ()
        powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
        counts = np.bincount(powers)
        first = int(np.flatnonzero(counts)[0])
        return tuple((1 << power, int(counts[power])) for power in range(first, len(counts)))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {**asdict(self), "histogram": [list(pair) for pair in self.histogram]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TextSummary:
        """Return the summary that `to_dict` described."""
        tuples: dict[str, Any] = {
            name: tuple(values[name]) for name in ("dropped_rows", "longest_prompt") if name in values
        }
        histogram = tuple((low, rows) for low, rows in values["histogram"])
        return cls(**{**values, **tuples, "histogram": histogram})

    def facts(self) -> dict[str, Any]:
        """Return the counts as the report of a run shows them, with a line for each range of lengths."""
        hidden = {"histogram", "largest_id", "dropped_rows", "longest_row", "longest_prompt"} | (
            {"packed_rows"} if self.packed_rows is None else set()
        )
        named = {name.replace("_", " "): value for name, value in asdict(self).items() if name not in hidden}
        lengths = {f"rows of {low:,} to {2 * low - 1:,} tokens": rows for low, rows in self.histogram}
        return {**named, **lengths}

    def __str__(self) -> str:
        share = self.trained_tokens / self.tokens if self.tokens else 0.0
        return (
            f"{self.rows:,} rows, {self.tokens:,} tokens ({share:.0%} trained), longest {self.longest:,}; "
            f"{self.truncated:,} truncated, {self.dropped:,} dropped"
            + ("" if self.packed_rows is None else f"; packed into {self.packed_rows:,} rows")
        )


def _longest_prompt(rows: TokenRows) -> tuple[int, int]:
    """The most tokens before the first label of a row, and the place of that row."""
    most, place, labels = 0, 0, rows.flat["labels"]
    for first in range(0, len(rows), _ROWS):  # so that memory does not grow with the dataset
        borders = rows.offsets[first : first + _ROWS + 1]
        trained = borders[0] + np.flatnonzero(labels[borders[0] : borders[-1]] != IGNORED)
        at = np.searchsorted(trained, borders[:-1])
        prompts = np.append(trained, borders[-1])[at] - borders[:-1]
        if len(prompts) and prompts.max() > most:
            most, place = int(prompts.max()), first + int(prompts.argmax())
    return most, place
