"""The plain values of a recipe, and where each of them was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.cli.schema import SHORTHANDS
from windlass.config.documents import Document, Keys, load, loads, parse_override
from windlass.core.errors import ConfigError, Problem

# `model=NAME` replaces the whole section of the file; `data=FILE` only its first key.
REPLACED = ("model", "tokenizer")
BUILT_IN = Path(__file__).with_name("default.yaml")


class RecipeDraft:
    """The values of a recipe file with overrides applied.

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
        """Read the recipe at `path`, or the built-in one. Raises ConfigError if it is not a YAML mapping."""
        if path is None:
            return cls(loads(BUILT_IN.read_text(encoding="utf-8"), "built-in recipe"))
        return cls(load(path))

    def override(self, overrides: Sequence[str]) -> None:
        """Apply `key=value` overrides; those that cannot be read are added to `problems`."""
        for text in overrides:
            try:
                keys, value = parse_override(text)
            except ConfigError as error:
                self.problems += error.problems
                continue
            short = SHORTHANDS.get(keys[0]) if len(keys) == 1 and isinstance(value, str) else None
            if short is None:
                self.put(keys, value)
            elif keys[0] in REPLACED:
                self.put(keys, {short: value})
            else:
                self.put((*keys, short), value)

    def put(self, keys: Keys, value: Any) -> None:
        """Set one value, creating its sections."""
        node = self.values
        for key in keys[:-1]:
            inner = node.setdefault(key, {})
            if inner is None:
                inner = node[key] = {}
            if not isinstance(inner, dict):
                return  # not a section: reported by the check of the whole
            node = inner
        node[keys[-1]] = value
        self._overridden.add(keys)

    def label(self, *keys: str) -> str:
        """Return the name of a value in errors: `recipe.yaml:12: data.train`, or `data.train` of an override."""
        if not any(keys[:depth] in self._overridden for depth in range(1, len(keys) + 1)):
            # A shorthand or a missing key has the line of its section.
            for depth in range(len(keys), 0, -1):
                line = self._document.lines.get(keys[:depth])
                if line is not None:
                    return f"{self._document.source}:{line}: {'.'.join(keys)}"
        return ".".join(keys)
