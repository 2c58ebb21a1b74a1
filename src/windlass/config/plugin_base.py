"""Common parts of the configuration objects of a user-owned loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

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
        """Problems of these options. They are checked on use, not on construction."""
        yield from type_problems(self)


def type_problems(options: Any, **least: int) -> Iterator[Problem]:
    """A problem for each flag that is not a bool or None, and for each number that is too small.

    Args:
        least: the smallest value of a whole number, by field; 1 for those that are not named.
    """
    for name, hint in get_type_hints(type(options)).items():
        value, kinds = getattr(options, name), get_args(hint) or (hint,)
        if value is None:
            continue
        if bool in kinds and not isinstance(value, bool):
            yield Problem(f"{type(options).__name__}.{name}", value, "must be True or False")
        elif int in kinds:
            yield from count_problems(options, (name,), least.get(name, 1))


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


def count_problems(options: Any, names: tuple[str, ...], least: int = 1) -> Iterator[Problem]:
    """A problem for each of the named fields that is set and is not a whole number of at least `least`."""
    for name in names:
        value = getattr(options, name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
            continue
        yield Problem(
            f"{type(options).__name__}.{name}", value, f"must be a whole number of at least {least}"
        )


def stated(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from those of one made without arguments."""
    unsaid = type(options)()
    values = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if value != getattr(unsaid, name)}
