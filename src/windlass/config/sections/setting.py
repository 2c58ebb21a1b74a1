"""The declaration of one argument in a section: default, help and all rules that concern it alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that an argument may be, and how a message says so."""

    holds: Callable[[Any], bool]
    words: str


def at_least(low: float, hint: str = "") -> Range:
    return Range(lambda v: low <= v < math.inf, f"must be at least {low}{hint}")


def between(low: float, high: float) -> Range:
    """The half-open interval [low, high)."""
    return Range(lambda v: low <= v < high, f"must be at least {low} and below {high}")


STRIDE = Range(
    lambda v: v == 0 or 0 < v < 1 or (v >= 1 and v < math.inf and v == int(v)),
    "must be a whole number of updates, or a share of all updates between 0 and 1",
)
FINITE = Range(math.isfinite, "must be a finite number")
POSITIVE = Range(lambda v: 0 < v < math.inf, "must be above 0")

# Why arguments may differ between ranks.
OWN_DISK = "a path on a disk that may be this machine's own; the stores check what they need"
OWN_OUTPUT = "what this process prints or reports; no other process reads it"
READING = "how fast this machine reads; samples and their order do not depend on it"


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for an argument besides its type.

    Attributes:
        bounds: the numbers that it may be.
        words: what it, or each of its items, may be.
        read: gives what a text means, and raises ValueError with the end of a sentence if it means nothing.
        document: it holds a dict, and may be given as JSON text or as the path of a JSON file.
        per_rank: why it may differ between the ranks of a job; empty if it must be the same on all.
        mapped: what it is taken as, if it does not do what its name says.
        noted_at: the value at which a user is told so; None tells nobody.
        refused: why it cannot be set to other than its default; empty if it can.
    """

    bounds: Range | None = None
    words: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None
    document: bool = False
    per_rank: str = ""
    mapped: str = ""
    noted_at: Any = None
    refused: str = ""


_RULES = "rules"
_RULE_NAMES = {field.name for field in dataclasses.fields(Rules)}


def setting(default: Any, help: str, *, secret: bool = False, **others: Any) -> Any:
    """A dataclass field with its help text.

    Args:
        default: a list is copied for each instance.
        secret: its value is never printed.
        others: attributes of its `Rules`, and options of its command-line flag (as `choices`, which are checked too).
    """
    rules = Rules(**{name: value for name, value in others.items() if name in _RULE_NAMES})
    flag = {name: value for name, value in others.items() if name not in _RULE_NAMES}
    info = {"help": help, _RULES: rules, **flag}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=info)
    return dataclasses.field(default=default, metadata=info, repr=not secret)


def flag_options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The options of a field's command-line flag."""
    return {name: value for name, value in field.metadata.items() if name != _RULES}


def rules_in(field: dataclasses.Field[Any]) -> Rules:
    """The rules of a field that `setting` declared; another has none."""
    rules: Rules = field.metadata.get(_RULES, Rules())
    return rules


def rules_of(cls: Any) -> dict[str, Rules]:
    """The rules of the arguments that Windlass declares, in order. They hold for a subclass that redeclares a field."""
    own = next(base for base in cls.__mro__ if base.__module__.startswith("windlass."))
    return {field.name: field.metadata[_RULES] for field in dataclasses.fields(own)}
