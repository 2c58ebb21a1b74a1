"""The declaration of one argument: its default, its help, and the rules that concern it alone."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from windlass.config.kinds import as_stride, document


@dataclass(frozen=True, slots=True)
class Range:
    """A condition on a number, and the end of the sentence "NAME ..." if it does not hold."""

    holds: Callable[[Any], bool]
    words: str

    def fault(self, value: Any) -> str | None:
        """What is wrong with a number; None if nothing is."""
        if self.holds(value):
            return None
        return self.words if self is FINITE or -math.inf < value < math.inf else f"{self.words}, and finite"


def at_least(low: float, hint: str = "") -> Range:
    return Range(lambda v: low <= v < math.inf, f"must be at least {low}{hint}")


def above(low: float) -> Range:
    return Range(lambda v: low < v < math.inf, f"must be above {low}")


STRIDE = Range(
    lambda v: v == 0 or 0 < v < 1 or (v >= 1 and v < math.inf and v == int(v)),
    "must be a whole number of updates, or a share of all updates between 0 and 1",
)
# -1 stands in scripts whose strategy is another one than 'steps'; with 'steps' it is refused.
INTERVAL = Range(lambda v: v == -1 or STRIDE.holds(v), STRIDE.words)
BELOW_ONE = Range(lambda v: 0 <= v < 1, "must be at least 0 and below 1")
# Not `math.isfinite`, which raises OverflowError for a whole number that no float holds.
FINITE = Range(lambda v: -math.inf < v < math.inf, "must be a finite number")
SEED = Range(lambda v: 0 <= v < 1 << 64, "must be at least 0 and below 2**64")  # as of PyTorch's generators

# A bool beside text. Parsers that other libraries bring take the second type of a union, and cannot read one with bool:
# where they may get an argument, text is second.
Truth = Literal[True, False]

# Reasons why an argument may differ between ranks.
OWN_DISK = "a path on a disk that may be local to this machine; the stores check what they need"
OWN_OUTPUT = "what this process prints or reports; no other process reads it"
READING = "how fast this machine reads; samples and their order do not depend on it"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of an argument, besides its type."""

    bounds: Range | None = None  # the condition on a number
    words: tuple[str, ...] = ()  # the values that it, or each of its items, may have
    # Gives all spellings of a value one form before it is checked; raises ValueError as `read` does
    form: Callable[[Any], Any] | None = None
    # Parses a text; raises ValueError with the end of the sentence "NAME ..." if it cannot
    read: Callable[[Any], Any] | None = None
    document: bool = False  # it holds a dict, and may be given in any form that `kinds.document` reads
    per_rank: str = ""  # why it may differ between the ranks of a job; empty if it must be the same on all
    mapped: str = ""  # its effect, if it is accepted but does not do what its name says
    noted_at: Any = None  # the value at which `mapped` is logged; None never logs it
    refused: str = ""  # why it can only have its default; empty if it is honoured


_RULES = "rules"
_RULE_NAMES = {field.name for field in dataclasses.fields(Rules)}


class _Declared(dict[str, Any]):
    """The metadata of a field. Parsers that other libraries bring copy it for `argparse`, which refuses the rules."""

    def copy(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if name != _RULES}


def setting(default: Any, help: str, *, secret: bool = False, **others: Any) -> Any:
    """A dataclass field with its help text.

    Args:
        default: a list or dict is copied for each instance.
        secret: its value is never printed.
        others: attributes of its `Rules`, and options of its command-line flag (as `choices`, which are checked too).
    """
    is_stride = others.get("bounds") in (STRIDE, INTERVAL)
    form = document if others.get("document") else as_stride if is_stride else None
    rules = Rules(**{"form": form, **{name: value for name, value in others.items() if name in _RULE_NAMES}})
    flag = {name: value for name, value in others.items() if name not in _RULE_NAMES}
    info = _Declared({"help": help, _RULES: rules, **flag})
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=info)
    return dataclasses.field(default=default, metadata=info, repr=not secret)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, made by its factory if it has one; `dataclasses.MISSING` if it must be given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def flag_options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The options of a field's command-line flag."""
    return {name: value for name, value in field.metadata.items() if name != _RULES}


def rules_in(field: dataclasses.Field[Any]) -> Rules:
    """The rules of a field; one that `setting` did not declare has none."""
    rules: Rules = field.metadata.get(_RULES, Rules())
    return rules


@functools.cache  # of some two hundred fields, in each check of a run's arguments
def rules_of(cls: Any) -> dict[str, Rules]:
    """The rules of the fields that Windlass declares, in order, also if a subclass declares them again."""
    own = next(base for base in cls.__mro__ if base.__module__.startswith("windlass."))
    return {field.name: field.metadata[_RULES] for field in dataclasses.fields(own)}


Cls = TypeVar("Cls", bound=type)
_HEADING = "Attributes:"


def described(words: Mapping[str, Any] | None = None) -> Callable[[Cls], Cls]:
    """Return a decorator that lists the fields of a dataclass in its docstring: name, type, default and help. `words`
    has the `Key` of fields which `setting` does not declare.
    """
    keys = words or {}

    def describe(cls: Cls) -> Cls:
        lines = []
        for field in dataclasses.fields(cls):
            if text := field.metadata.get("help"):
                rules = rules_in(field)
                lines.append(_line(field, text, rules.refused or rules.mapped))
            elif key := keys.get(field.name):
                lines.append(_line(field, key.doc, key.refused or key.idle))
        # Python 3.13 removes the indentation itself.
        doc, raises, errors = inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")
        heading = [] if _HEADING in doc else ["", _HEADING]
        cls.__doc__ = "\n".join([doc, *heading, *lines]) + raises + errors
        return cls

    return describe


def _line(field: dataclasses.Field[Any], text: str, reason: str) -> str:
    default = default_of(field)
    given = "required" if default is dataclasses.MISSING else f"default {default!r}"
    return f"    {field.name} ({field.type}, {given}): {text}{f' It {reason}.' if reason else ''}"
