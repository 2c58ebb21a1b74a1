"""The plain values of a recipe, and where each of them was written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from windlass.config.documents import Document, Keys, load, one_line, parse_override
from windlass.core.errors import ConfigError, Problem
from windlass.recipes.built_in_recipes import recipe_path
from windlass.recipes.schema import SHORTHANDS

# A name that is given as an override replaces what the file has in its place.
ALTERNATIVES: dict[Keys, Keys] = {
    ("model", "name"): ("config", "model_type"),
    ("tokenizer", "name"): ("train",),
}

_PATHS = (("data", "train"), ("data", "eval"), ("data", "test"), ("data", "mixture"), ("model", "name"),
          ("tokenizer", "name"))  # fmt: skip


class RecipeDraft:
    """The values of a recipe file with overrides applied.

    Attributes:
        values: mapping of sections, as plain Python values.
        problems: overrides that could not be read.
    """

    def __init__(self, document: Document) -> None:
        self.values: dict[str, Any] = document.values
        self.problems: list[Problem] = []
        self._source, self._lines = document.source, dict(document.lines)
        self._overridden: dict[Keys, str] = {}  # and by what
        self._amended: set[Keys] = set()
        for section, key in SHORTHANDS.items():
            if isinstance(self.values.get(section), str):
                self.values[section] = {key: self.values[section]}
                self._lines[section, key] = self._lines[section,]

    @classmethod
    def read(cls, path: str | Path) -> RecipeDraft:
        """Read a recipe, or the built-in one of this name. Raises ConfigError if it is not a YAML mapping."""
        return cls(load(recipe_path(path)))

    def override(self, overrides: Sequence[str]) -> None:
        """Apply `key=value` overrides; those that cannot be read are added to `problems`."""
        for text in overrides:
            try:
                keys, value = parse_override(text)
            except ConfigError as error:
                self.problems += error.problems
                continue
            if len(keys) == 1 and isinstance(value, str) and keys[0] in SHORTHANDS:
                keys = (*keys, SHORTHANDS[keys[0]])
            self._check_sections(keys, value)
            self.put(keys, value)
            section = self.values.get(keys[0])
            for other in ALTERNATIVES.get(keys, ()):
                if isinstance(section, dict) and not self.is_overridden(keys[0], other):
                    section.pop(other, None)

    def _check_sections(self, keys: Keys, value: Any) -> None:
        """Note a problem if there is a value, and no section, where a key is to be set."""
        node: Any = self.values
        for depth, key in enumerate(keys[:-1], 1):
            node = node.get(key)
            if node is None:
                return
            if not isinstance(node, dict):
                fix = f"has no effect: {'.'.join(keys[:depth])} is {one_line(node)}, which has no keys"
                self.problems.append(Problem(".".join(keys), value, fix))
                return

    def wrong_keys(self) -> Iterator[Problem]:
        """Yield a problem for each key that is not text: YAML reads `1:` and `true:` as values of other types."""
        for keys, name in _keys_of_other_types(self.values, ()):
            yield Problem(self.label(*keys), name, f"is not a name; quote it: {keys[-1]!r}")

    def expand_home(self) -> None:
        """Write out `~` in the paths of data, model and tokenizer. A shell does it on a command line alone, and the
        libraries that load them take it for a part of a name.
        """
        for section, key in _PATHS:
            values = self.values.get(section)
            if isinstance(values, dict) and key in values:
                values[key] = _at_home(values[key])

    def section(self, name: str) -> Any:
        """Return the values of a section; an empty mapping if the recipe has none."""
        return self.values.get(name) or {}

    def put(self, keys: Keys, value: Any) -> None:
        """Set one value as an override, creating its sections."""
        self._set(keys, value)
        self._overridden[keys] = "the command line"

    def chosen_by(self, origin: str, names: Iterable[str]) -> None:
        """Name what chose the values of these dotted keys, which are overrides."""
        known = {f"{name}.{SHORTHANDS[name]}" if name in SHORTHANDS else name for name in names}
        self._overridden |= {keys: origin for keys in self._overridden if ".".join(keys) in known}

    def amend(self, keys: Keys, value: Any) -> None:
        """Set one value as `--tiny` asks for it, creating its sections, unless it is an override."""
        if not self.is_overridden(*keys):
            self._set(keys, value)
            self._amended.add(keys)

    def _set(self, keys: Keys, value: Any) -> None:
        node = self.values
        for depth, key in enumerate(keys[:-1]):
            # As the file may spell it: `mesh.pp_schedule:` in one word.
            if (word := ".".join(keys[depth:])) in node:
                node[word] = value
                return
            inner = node.setdefault(key, {})
            if inner is None:
                inner = node[key] = {}
            if not isinstance(inner, dict):
                return  # not a section: reported by the check of the whole
            node = inner
        node[keys[-1]] = value

    def origin(self, *keys: str) -> str | None:
        """Return where a value was set: `recipe.yaml:12`, `the command line` or a flag; None if it was not."""
        around = [keys[:depth] for depth in range(len(keys), 0, -1)]
        if by := next((self._overridden[part] for part in around if part in self._overridden), None):
            return by
        if any(part in self._amended for part in around):
            return "--tiny"
        return f"{self._source}:{self._lines[keys]}" if keys in self._lines else None

    def is_overridden(self, *keys: str) -> bool:
        """Return True if this value, or a section around it, was given as an override."""
        # Of a section as a whole too: `data={train: x}` on the command line replaces all of the file's section.
        return any(keys[:depth] in self._overridden for depth in range(1, len(keys) + 1))

    def label(self, *keys: str) -> str:
        """Return the name of a value in errors: `recipe.yaml:12: data.train`, or `data.train` of an override."""
        if not self.is_overridden(*keys):
            # A missing key has the line of its section.
            for depth in range(len(keys), 0, -1):
                line = self._lines.get(keys[:depth])
                if line is not None:
                    return f"{self._source}:{line}: {'.'.join(keys)}"
        return ".".join(keys)


def _at_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_at_home(path) for path in value]
    if isinstance(value, dict):
        return {_at_home(path): weight for path, weight in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) else value


def _keys_of_other_types(values: Any, path: Keys) -> Iterator[tuple[Keys, object]]:
    if isinstance(values, dict):
        for name, value in values.items():
            here = (*path, name if isinstance(name, str) else one_line(name))
            if not isinstance(name, str):
                yield here, name
            yield from _keys_of_other_types(value, here)
