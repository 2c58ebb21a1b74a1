"""What a preparation did: rows, tokens, what was truncated and dropped, and how long the rows are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from windlass.text.encoder import IGNORED
from windlass.text.token_rows import TokenRows


@dataclass(frozen=True, slots=True)
class TextSummary:
    """Counts of a prepared dataset.

    Attributes:
        rows: rows that were kept.
        tokens: of these rows.
        trained_tokens: tokens with a label.
        truncated: rows that were cut to the maximum length.
        dropped: rows that were left out, because none of their tokens had a label.
        longest: tokens of the longest row.
        largest_id: the largest token, which the embedding of a model must have.
        histogram: (lower bound, rows) of ranges of lengths; a range ends where the next one begins, at twice its
            lower bound.
        packed_rows: rows that these were packed into; None = they were not packed.
    """

    rows: int
    tokens: int
    trained_tokens: int
    truncated: int
    dropped: int
    longest: int
    largest_id: int
    histogram: tuple[tuple[int, int], ...]
    packed_rows: int | None = None

    @classmethod
    def of(cls, rows: TokenRows, truncated: int, dropped: int) -> TextSummary:
        """Count prepared rows."""
        lengths = rows.lengths
        trained = int(np.count_nonzero(rows.flat["labels"] != IGNORED))
        longest = int(lengths.max()) if len(lengths) else 0
        largest = int(rows.flat["input_ids"].max()) if len(rows.flat["input_ids"]) else 0
        counts = cls.histogram_of(lengths)
        return cls(len(rows), int(lengths.sum()), trained, truncated, dropped, longest, largest, counts)

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
        return cls(**{**values, "histogram": tuple((low, rows) for low, rows in values["histogram"])})

    def facts(self) -> dict[str, Any]:
        """Return the counts as the report of a run shows them, with a line for each range of lengths."""
        hidden = {"histogram", "largest_id"} | ({"packed_rows"} if self.packed_rows is None else set())
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
