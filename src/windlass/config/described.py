"""Docstrings of configuration classes with a line for each field, from the declarations of the fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from windlass.config.parallel.keys import Key
from windlass.config.sections.setting import default_of, rules_in

Cls = TypeVar("Cls", bound=type)
_HEADING = "    Attributes:"


def described(words: Mapping[str, Key] | None = None) -> Callable[[Cls], Cls]:
    """Return a decorator that lists the fields of a dataclass in its docstring: name, type, default and help. `words`
    has the settings of fields which `setting` does not declare.
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
        doc, raises, errors = (cls.__doc__ or "").rstrip().partition("\n\n    Raises:")
        heading = [] if _HEADING in doc else ["", _HEADING]
        cls.__doc__ = "\n".join([doc, *heading, *lines]) + raises + errors
        return cls

    return describe


def _line(field: dataclasses.Field[Any], text: str, reason: str) -> str:
    default = default_of(field)
    given = "required" if default is dataclasses.MISSING else f"default {default!r}"
    return f"        {field.name} ({field.type}, {given}): {text}{f' It {reason}.' if reason else ''}"
