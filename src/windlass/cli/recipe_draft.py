"""A recipe while it is being put together: plain values, and where each of them was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.cli.schema import SHORTHANDS
from windlass.config.documents import Document, Keys, load, loads, parse_override
from windlass.core.errors import ConfigError, Problem

# `model=NAME` means this model *instead of* the one that the file describes; `data=FILE` changes no columns.
REPLACED = ("model", "tokenizer")
BUILT_IN = Path(__file__).with_name("default.yaml")


class RecipeDraft:
    """The values of a recipe file with overrides laid over them.

    Attributes:
        values: mapping of sections, as plain Python values.
        problems: overrides that could not be read.
    """

    def __init__(self, document: Document) -> None:
        self.values: dict[str, Any] = document.values
        self.problems: list[Problem] = []
        self._document = document
        self._overridden: set[Keys] = set()
        for section, key in SHORTHANDS.items():
            if isinstance(self.values.get(section), str):
                self.values[section] = {key: self.values[section]}

    @classmethod
    def read(cls, path: str | Path | None) -> RecipeDraft:
        """The recipe at `path`, or the built-in one. Raises ConfigError for what is no YAML mapping, with its line."""
        if path is None:
            return cls(loads(BUILT_IN.read_text(encoding="utf-8"), "built-in recipe"))
        return cls(load(path))

    def override(self, overrides: Sequence[str]) -> None:
        """Lay `key=value` over the values; what cannot be read joins `problems`."""
        for text in overrides:
            try:
                keys, value = parse_override(text)
            except ConfigError as error:
                self.problems += error.problems
                continue
            if len(keys) == 1 and keys[0] in SHORTHANDS and isinstance(value, str):
                self._put_shorthand(keys[0], value)
            else:
                self.put(keys, value)

    def _put_shorthand(self, section: str, value: str) -> None:
        if section in REPLACED:
            self.put((section,), {SHORTHANDS[section]: value})
        else:
            self.put((section, SHORTHANDS[section]), value)

    def put(self, keys: Keys, value: Any) -> None:
        """Set one value, making the sections on the way."""
        node = self.values
        for key in keys[:-1]:
            inner = node.setdefault(key, {})
            if inner is None:
                inner = node[key] = {}
            if not isinstance(inner, dict):
                return  # something else stands where a section belongs; the check of the whole says so
            node = inner
        node[keys[-1]] = value
        self._overridden.add(keys)

    def label(self, *keys: str) -> str:
        """What an error calls the value at `keys`: `recipe.yaml:12: data.train`, or the bare name of an override."""
        if not any(keys[:depth] in self._overridden for depth in range(1, len(keys) + 1)):
            for depth in range(
                len(keys), 0, -1
            ):  # a shorthand or a missing key stands where its section stands
                line = self._document.lines.get(keys[:depth])
                if line is not None:
                    return f"{self._document.source}:{line}: {'.'.join(keys)}"
        return ".".join(keys)
