"""What the configuration objects of a user-owned loop share."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.config.parallel.keys import Key
from windlass.core.errors import Problem


class KwargsHandler:
    """A group of options that knows which of them differ from the defaults."""

    def to_dict(self) -> dict[str, Any]:
        """All options, as copies."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}

    def objections(self) -> Iterator[Problem]:
        """What of these options cannot be honoured. Asked when they are used, not when they are written down."""
        yield from ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that has one value Windlass can honour; every other is refused with the reason."""

    field: str
    honoured: Any
    reason: str


def refused(options: Any, refusals: tuple[Refusal, ...]) -> Iterator[Problem]:
    """A problem for each field of `options` whose value cannot be honoured."""
    for refusal in refusals:
        value = getattr(options, refusal.field)
        if value != refusal.honoured:
            yield Problem(f"{type(options).__name__}.{refusal.field}", value, refusal.reason)


def flag_problems(options: Any, names: tuple[str, ...]) -> Iterator[Problem]:
    """A problem for each of the named fields that is neither true nor false nor unsaid."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not isinstance(value, bool):
            yield Problem(f"{type(options).__name__}.{name}", value, "must be True or False")


def count_problems(options: Any, names: tuple[str, ...], least: int = 1) -> Iterator[Problem]:
    """A problem for each of the named fields that is said and no whole number of at least `least`."""
    for name in names:
        value = getattr(options, name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
            continue
        yield Problem(
            f"{type(options).__name__}.{name}", value, f"must be a whole number of at least {least}"
        )


def described(options: type, keys: Mapping[str, Key]) -> None:
    """Add to the docstring of a class of options what the table of settings says about each of its fields."""
    known = {field.name: keys[field.name] for field in dataclasses.fields(options) if field.name in keys}
    notes = {name: f" It {why}." if (why := key.refused or key.idle) else "" for name, key in known.items()}
    lines = [f"        {name}: {key.doc}{notes[name]}" for name, key in known.items()]
    if options.__doc__ is not None:
        options.__doc__ = "\n".join([options.__doc__.rstrip(), *lines, "    "])


def value_problems(options: Any, keys: Mapping[str, Key]) -> Iterator[Problem]:
    """A problem for each field that was said and that its setting cannot read."""
    for name, value in stated(options).items():
        try:
            _ = value if value is None or name not in keys else keys[name].read(value)
        except ValueError as error:
            yield Problem(f"{type(options).__name__}.{name}", value, str(error))


def stated(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from those of one made without arguments: what its author said."""
    unsaid = type(options)()
    values = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if value != getattr(unsaid, name)}
