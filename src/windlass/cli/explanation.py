"""What `windlass explain` found out about one argument or setting, as lines or as facts for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Explanation:
    """Attributes:
    name: its dotted name.
    value: in the recipe or settings given, else its default.
    facts: what is said about it, in the order of the lines: a word, and a text or several.
    """

    name: str
    value: Any
    facts: list[tuple[str, str | list[str]]] = field(default_factory=list)

    def add(self, word: str, said: str | list[str] | None) -> None:
        """Add a fact, unless there is nothing to say."""
        if said:
            self.facts.append((word, said))

    def lines(self) -> Iterator[str]:
        """Yield the lines that are printed."""
        yield f"{self.name} = {as_text(self.value)}"
        for word, said in self.facts:
            yield f"  {word:<9} {said if isinstance(said, str) else ', '.join(said)}"

    def as_json(self) -> dict[str, Any]:
        """Return it for programs: a word that occurs several times has a list of texts."""
        facts: dict[str, str | list[str]] = {}
        for word, said in self.facts:
            before = facts.get(word)
            facts[word] = said if before is None else [*_listed(before), *_listed(said)]
        return {"name": self.name, "value": self.value, "facts": facts}


def _listed(said: str | list[str]) -> list[str]:
    return [said] if isinstance(said, str) else said


def as_text(value: Any) -> str:
    """Return a value as a recipe spells it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)
