"""Values with where they came from, and how layers of them meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from windlass.config.parallel.keys import Key
from windlass.core.errors import Problem

Source = Literal["script", "flag", "variable", "file", "default"]
# Of two that differ, the one further left holds; a script and its launcher contradict each other instead.
_PRECEDENCE: tuple[Source, ...] = ("script", "flag", "variable", "file", "default")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and who said it.

    Attributes:
        key: canonical name.
        value: in canonical form.
        origin: where it was said, in words that its author knows: "--num_processes", "fsdp_config of two.yaml".
        source: the kind of place.
        weak: written by a tool unasked (such as a default in a file that answers to questions made), so that
            anything that was meant goes before it.
        over: settings of the same key that gave way to this one.
    """

    key: str
    value: Any
    origin: str
    source: Source = "default"
    weak: bool = False
    over: tuple[Setting, ...] = field(default=(), compare=False)


class Settings(dict[str, Setting]):
    """Settings by canonical name, the problems met while reading them, and sentences to be said once."""

    def __init__(self, settings: Mapping[str, Setting] | None = None) -> None:
        super().__init__(settings or {})
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def say(self, key: Key, raw: Any, origin: str, source: Source, weak: bool | None = None) -> None:
        """Read `raw` and record it, or the problem with it; None leaves the key unsaid.

        Args:
            weak: whether nobody may have meant it; None tells by the value, for places that tools fill in.
        """
        if raw is None:
            return
        if key.refused:
            if key.asks(raw):
                self.problems.append(Problem(origin, raw, key.refused))
            return
        try:
            value = key.read(raw)
        except ValueError as error:
            self.problems.append(Problem(origin, raw, str(error)))
            return
        if value is None:
            return
        if weak is None:
            weak = key.is_weak(value)
        if key.idle and not weak:
            self.notes.append(f"{origin}={raw!r} {key.idle}")
        self.add(Setting(key.name, value, origin, source, weak))

    def add(self, new: Setting) -> None:
        """Lay `new` beside what is there: what was meant goes before what tools wrote, then the stronger place."""
        old = self.get(new.key)
        if old is None:
            self[new.key] = new
            return
        if not old.weak and not new.weak and old.value != new.value and _quarrel(old, new):
            self.problems.append(contradiction(old, new))
        first, second = (old, new) if _goes_before(old, new) else (new, old)
        self[new.key] = replace(first, over=(*first.over, second))

    def value(self, key: Key) -> Any:
        said = self.get(key.name)
        return key.default if said is None else said.value

    def meant(self, name: str) -> bool:
        """Whether somebody, and not only a tool, said it."""
        said = self.get(name)
        return said is not None and not said.weak


def merge(*layers: Settings) -> Settings:
    """All layers as one. Flags go before variables, these before files; what a script says must agree with the rest.

    Contradictions between a script and its launcher, and within one place, become problems of the result.
    """
    merged = Settings()
    for layer in layers:
        merged.problems += layer.problems
        merged.notes += layer.notes
        for setting in layer.values():
            merged.add(setting)
    return merged


def contradiction(one: Setting, other: Setting) -> Problem:
    fix = f"contradicts {other.origin}={other.value!r}; say it in one of the two places, or the same in both"
    return Problem(one.origin, one.value, fix)


def _quarrel(one: Setting, other: Setting) -> bool:
    sources = {one.source, other.source}
    return len(sources) == 1 or ("script" in sources and "default" not in sources)


def _goes_before(old: Setting, new: Setting) -> bool:
    if old.weak != new.weak:
        return new.weak
    return _PRECEDENCE.index(old.source) <= _PRECEDENCE.index(new.source)


def meant_among(settings: Settings, names: Iterable[str]) -> list[Setting]:
    """Those of `names` that somebody said, in order."""
    return [settings[name] for name in names if settings.meant(name)]
