"""Checks of one value at a time: its type, its bounds, its choices."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from windlass.config.kinds import from_text
from windlass.config.sections.setting import Rules, Truth, default_of
from windlass.core.errors import ConfigError, Problem, did_you_mean

_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    type(None): "None",
    list: "a list",
    dict: "a dict",
}
_ITEM_WORDS = {int: "whole numbers", float: "numbers", bool: "True and False", str: "text"}


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """The resolved types of the fields that Windlass itself declares (not those of a script's subclass)."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("windlass.") and dataclasses.is_dataclass(base):
            found = {**get_type_hints(base), **found}
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return {name: hint for name, hint in found.items() if name in fields}


@functools.cache  # of some two hundred fields, in each check of a run's arguments
def alternatives(cls: Any) -> dict[str, tuple[Any, ...]]:
    """The `members` of the types of these fields."""
    return {name: members(hint) for name, hint in hints(cls).items()}


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type: `int | None` is (int, NoneType)."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(bool if kind == Truth else kind for kind in kinds)


def coerce(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert text values of fields that are numbers or bools; leave all others unchanged."""
    types = hints(cls) if dataclasses.is_dataclass(cls) else {}
    return {name: from_text(value, members(types.get(name, Any))) for name, value in values.items()}


def wrong_values(options: Any, rules: Mapping[str, Rules]) -> Iterator[Problem]:
    """A problem for each field that has `rules`, those of its class, and whose value breaks them."""
    cls: Any = type(options)
    fields, sound = _fields(cls), _sound_defaults(cls)
    for name, kinds in alternatives(cls).items():
        if name not in rules:
            continue
        value, field = getattr(options, name), fields[name]
        if value is sound.get(name, dataclasses.MISSING):
            continue
        fault = value_fault(value, kinds, rules[name], field.metadata.get("choices"))
        if fault is None and rules[name].refused and value not in (default_of(field), None, False, ""):
            fault = rules[name].refused
        if fault is not None:
            yield Problem(name, value, fault)
        elif value is field.default:
            sound[name] = value


@functools.cache
def _fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls)}


@functools.cache
def _sound_defaults(cls: Any) -> dict[str, Any]:
    """The defaults that were found to break no rule, of which most values of a run are: each is checked once."""
    return {}


def value_fault(value: Any, kinds: tuple[Any, ...], rules: Rules, choices: Any) -> str | None:
    """Why `value` breaks the type or the rules of its field; None if it does not."""
    fault = None if rules.document else type_fault(value, kinds)
    if fault is not None or value is None:
        return fault
    if rules.bounds is not None and (fault := rules.bounds.fault(value)) is not None:
        return fault
    try:
        for reader in filter(None, (rules.form, rules.read)):
            reader(value)
    except ConfigError as error:  # of what the value holds
        return "; ".join(f"{p.field.partition('.')[2] or p.field}: {p.fix}" for p in error.problems)
    except ValueError as error:
        return str(error)
    return choice_fault(value, choices or rules.words) if choices or rules.words else None


def type_fault(value: Any, kinds: tuple[Any, ...]) -> str | None:
    """Why `value` is of none of these types, the alternatives of a field's; None if it is."""
    if any(_is_a(value, kind) for kind in kinds):
        return _enum_fault(value, kinds)
    fault = f"must be {_describe(kinds)}, and is {_type_of(value)}"
    return f"{fault}; use {_as_number(value)}" if _as_number(value) and {int, float} & set(kinds) else fault


def _type_of(value: Any) -> str:
    """The name of its type, with those of the items of a list or a dict, of which one alone may be wrong."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    kinds = dict.fromkeys(type(item).__name__ for item in items)
    return type(value).__name__ + (f" of {' and '.join(kinds)}" if kinds else "")


def _as_number(value: Any) -> str | None:
    """The call that makes a number of a text that holds one, such as "1e-4"; None for anything else."""
    for kind in (int, float):
        try:
            if isinstance(value, str) and kind(value) is not None:
                return f'{kind.__name__}("{value}")'
        except ValueError:
            continue
    return None


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_is_item(item, get_args(kind)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_item(item, get_args(kind)[1]) for item in value.values())
    if origin is tuple:  # files have lists only
        return isinstance(value, list | tuple)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else origin or kind)


def _is_item(value: Any, kind: Any) -> bool:
    # A word that is not a member is reported as a wrong choice, which is more precise than a wrong type.
    return isinstance(value, str) if _is_enum(kind) or get_origin(kind) is Literal else _is_a(value, kind)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _enum_fault(value: Any, kinds: tuple[Any, ...]) -> str | None:
    """Why text is not a word of the enum in `Choice | str` or `list[Choice]`; None if it is, or there is no enum."""
    if isinstance(value, list):
        items = [item for kind in kinds if get_origin(kind) is list for item in get_args(kind)]
        kinds = (*items, *kinds)
    for kind in kinds:
        if _is_enum(kind):
            return choice_fault(value, [member.value for member in kind])
    return None


def choice_fault(value: Any, choices: Any) -> str | None:
    """Why `value` (or an item or a key of it) is not among `choices`; None if it is."""
    for item in value if isinstance(value, list | dict) else [value]:
        if item not in choices:
            hint = did_you_mean(str(item), map(str, choices))
            return f"must be one of {', '.join(map(str, choices))}{hint}"
    return None


def _describe(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        origin = get_origin(kind) or kind
        if _is_enum(kind):
            words.append("one of " + ", ".join(str(member.value) for member in kind))
        elif origin is Literal:
            words.append("one of " + ", ".join(map(str, get_args(kind))))
        else:
            of = _ITEM_WORDS.get(get_args(kind)[-1]) if origin in (list, dict) and get_args(kind) else None
            words.append((_TYPE_WORDS.get(origin) or f"a {origin.__name__}") + (f" of {of}" if of else ""))
    return " or ".join(dict.fromkeys(words))


def stated(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from those of one made without arguments."""
    default = type(options)()
    values = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}
