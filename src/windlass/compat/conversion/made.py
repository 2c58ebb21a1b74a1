"""What a conversion reads and makes: a configuration that knows which keys were read, and the recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NO_SUCH_KEY = "a recipe has no such key"


class ForeignConfig:
    """A configuration of another program. A key that was not read is reported, so that none is lost silently.

    Keys without a value count as absent, as those programs take them.

    Args:
        folder: of the file; other files that it names may be relative to it.
        within: dotted key of these values in the file, for a part of it.
    """

    def __init__(self, values: Mapping[str, Any], folder: Path = Path(), within: str = "") -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.folder = folder
        self._within = within
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`; the key counts as read."""
        self._read.add(name)
        return self.values.get(name, default)

    def skip(self, names: Iterable[str]) -> None:
        """Count keys as read that ask for what a recipe does anyway, or for what changes no result."""
        self._read.update(names)

    def unread(self) -> dict[str, Any]:
        """Return the keys that were not read."""
        return {name: value for name, value in self.values.items() if name not in self._read}

    def dotted(self, name: str) -> str:
        """Return the name of a key within the file."""
        return f"{self._within}{name}"


@dataclass(slots=True)
class Conversion:
    """The recipe under construction."""

    program: str  # whose configuration is converted
    recipe: dict[str, Any] = field(default_factory=lambda: {"task": "sft"})  # sections and their values
    # Key of the file -> value and reason, for what the recipe does not have
    lost: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def put(self, dotted: str, value: Any) -> None:
        """Set a key of the recipe; later ones win."""
        *sections, last = dotted.split(".")
        place = self.recipe
        for name in sections:
            place = place.setdefault(name, {})
        place[last] = value

    def get(self, dotted: str) -> Any:
        """Return the value of a key that was set, else None."""
        place: Any = self.recipe
        for name in dotted.split("."):
            place = place.get(name) if isinstance(place, dict) else None
        return place

    def lose(self, source: ForeignConfig, name: str, why: str, value: Any = None) -> None:
        """Report a key of the file, or a default of the program, that the recipe does not have."""
        found = source.take(name)
        self.lost[source.dotted(name)] = (value if found is None else found), why

    def lose_rest(self, source: ForeignConfig, reasons: Mapping[str, str]) -> None:
        """Report all keys that were not read."""
        for name in source.unread():
            self.lose(source, name, reasons.get(name, _NO_SUCH_KEY))
