"""Values with their origin, and the rules by which values of several origins are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from windlass.config.parallel.keys import Key
from windlass.core.errors import Problem

Source = Literal["script", "flag", "variable", "file", "default"]
# If two values differ, the one further left is used; a script that contradicts its launcher is an error.
_PRECEDENCE: tuple[Source, ...] = ("script", "flag", "variable", "file", "default")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it was set."""

    key: str  # canonical name
    value: Any  # in canonical form
    origin: str  # where it was set, as its author wrote it: "--num_processes", "fsdp_config of two.yaml"
    source: Source = "default"  # the kind of place
    # Written by a tool and not requested by anybody (such as a default in a file that `windlass config` wrote); any
    # explicit value replaces it
    implicit: bool = False
    # Settings of the same key that this one replaced
    overridden: tuple[Setting, ...] = field(default=(), compare=False)

    def problem(self, fix: str) -> Problem:
        """Its problem; `fix` is as for `Problem`."""
        return Problem(self.origin, self.value, fix)


class Settings(dict[str, Setting]):
    """Settings by canonical name, the problems found while reading them, and notes to log once."""

    def __init__(self, settings: Mapping[str, Setting] | None = None) -> None:
        super().__init__(settings or {})
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def record(self, key: Key, raw: Any, origin: str, source: Source, implicit: bool | None = None) -> None:
        """Read `raw` and record it, or the problem with it; None leaves the key unset. `implicit`: a tool may have
        written it; None decides by the value, for places that tools write.
        """
        if raw is None:
            return
        if key.refused:
            if key.would_change(raw):
                self.problems.append(Problem(origin, raw, key.refused))
            return
        try:
            value = key.read(raw)
        except ValueError as error:
            self.problems.append(Problem(origin, raw, str(error)))
            return
        if value is None:
            return
        if implicit is None:
            implicit = key.is_implicit(value)
        if key.idle and not implicit:
            self.notes.append(f"{origin}={raw!r} {key.idle}")
        self.add(Setting(key.name, value, origin, source, implicit))

    def add(self, new: Setting) -> None:
        """Merge `new` with the setting that exists: explicit values come first, then those of the stronger source."""
        old = self.get(new.key)
        if old is None:
            self[new.key] = new
            return
        if not old.implicit and not new.implicit and old.value != new.value and _must_agree(old, new):
            self.problems.append(contradiction(old, new))
        first, second = (old, new) if _goes_before(old, new) else (new, old)
        self[new.key] = replace(first, overridden=(*first.overridden, second))

    def value(self, key: Key) -> Any:
        found = self.get(key.name)
        return key.default if found is None else found.value

    def explicit(self, *keys: Key) -> list[Setting]:
        """The settings among `keys` that a user, and not only a tool, set; in order."""
        found = [self[key.name] for key in keys if key.name in self]
        return [setting for setting in found if not setting.implicit]

    def without_effect(self, fix: str, *keys: Key) -> Iterator[Problem]:
        """A problem for each of `keys` that a script or a flag sets. What a file or a variable sets may be meant for
        other scripts.
        """
        return (found.problem(fix) for found in self.explicit(*keys) if found.source in ("script", "flag"))


def merge(*layers: Settings) -> Settings:
    """Merge all layers. Flags come before variables, and these before files; a script must agree with the others.

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
    fix = f"contradicts {other.origin}={other.value!r}; set it in one of the two places, or to the same value in both"
    return one.problem(fix)


def _must_agree(one: Setting, other: Setting) -> bool:
    sources = {one.source, other.source}
    return len(sources) == 1 or ("script" in sources and "default" not in sources)


def _goes_before(old: Setting, new: Setting) -> bool:
    if old.implicit != new.implicit:
        return new.implicit
    return _PRECEDENCE.index(old.source) <= _PRECEDENCE.index(new.source)
