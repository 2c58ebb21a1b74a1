"""The rows that `windlass data` shows and prepares, with what they are prepared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.text.forms import LocatedRows
from windlass.text.text_options import TextOptions


@dataclass(frozen=True, slots=True)
class SourceSplit:
    """Rows, and what they are prepared with."""

    rows: LocatedRows
    options: TextOptions


@dataclass(frozen=True, slots=True)
class DataSource:
    """Splits by name."""

    splits: dict[str, SourceSplit]
    tokenizer: Any  # None if none was named
