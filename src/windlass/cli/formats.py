"""The formats of data that a recipe reads, by the ending of a file or as the recipe names them."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.cli.schema import DataSpec

ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
    ".parquet": "parquet",
}
# Formats whose source is not a path.
PYTHON_DOCS, DIGITS = "python-docs", "digits"
PATHLESS = ("hub", PYTHON_DOCS, DIGITS)
# Formats that bring their own data.
BUILT_IN = (PYTHON_DOCS, DIGITS)
# Formats that are read as a stream.
STREAMED = ("hub", "jsonl", "parquet")
# Formats without labels or targets.
PLAIN_TEXT = ("txt", PYTHON_DOCS)


def format_of(source: str, data: DataSpec) -> str | None:
    """Return the format of `source`: that of the recipe, else by the path; None if its ending is not known."""
    if data.format != "auto":
        return data.format
    if os.path.isdir(source):
        return "folder"
    return ENDINGS.get(Path(source.lower().removesuffix(".gz")).suffix)


def is_data(word: str) -> bool:
    """Return True if a word in the place of a recipe names data. A `.json` file may be both, and is a recipe here."""
    kind = format_of(word, DataSpec())
    return kind is not None and kind != "json"
