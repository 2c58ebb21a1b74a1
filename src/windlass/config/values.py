"""Checks of one value at a time: its type, its choices."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, get_args, get_origin

from windlass.config.nearest import did_you_mean
from windlass.config.normalise import members

_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    type(None): "None",
}


def type_fault(value: Any, hint: Any) -> str | None:
    """Why `value` is not of type `hint`; None when it is."""
    kinds = members(hint)
    if any(_is_a(value, kind) for kind in kinds):
        return _enum_fault(value, kinds)
    return f"must be {_describe(kinds)}, and is {type(value).__name__}"


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_is_item(item, get_args(kind)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _is_item(value: Any, kind: Any) -> bool:
    # A word that is no member of an enum is reported as a wrong choice, which says more than a wrong type.
    return isinstance(value, str) if isinstance(kind, type) and issubclass(kind, Enum) else _is_a(value, kind)


def _enum_fault(value: Any, kinds: tuple[Any, ...]) -> str | None:
    """A word is text and so passes as `Choice | str`; it must still be one of the words."""
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    for item in get_args(next((k for k in kinds if get_origin(k) is list), None)):
        if isinstance(value, list) and isinstance(item, type) and issubclass(item, Enum):
            return next((fault for v in value if (fault := choice_fault(v, [m.value for m in item]))), None)
    return choice_fault(value, [m.value for m in enums[0]]) if enums else None


def choice_fault(value: Any, choices: Any) -> str | None:
    """Why `value` (or an item of it) is not among `choices`; None when it is."""
    for item in value if isinstance(value, list) else [value]:
        if item not in choices:
            return (
                f"must be one of {', '.join(map(str, choices))}{did_you_mean(str(item), map(str, choices))}"
            )
    return None


def _describe(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        if kind in _TYPE_WORDS:
            words.append(_TYPE_WORDS[kind])
        elif get_origin(kind) in (list, dict):
            words.append("a list" if get_origin(kind) is list else "a dict")
        elif isinstance(kind, type) and issubclass(kind, Enum):
            words.append("one of " + ", ".join(str(m.value) for m in kind))
    return " or ".join(dict.fromkeys(words))
