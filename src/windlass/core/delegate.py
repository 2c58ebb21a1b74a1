"""Delegate the methods and properties of a facade to its parts, with their signatures and docstrings."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def method_of(part: str, method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """A method of the facade that calls `method` of the object in its attribute `part`."""

    @functools.wraps(method)
    def call(facade: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return method(getattr(facade, part), *args, **kwargs)

    return call  # type: ignore[return-value]


def property_of(part: str, attribute: Callable[[Any], _R]) -> _R:
    """A read-only property of the facade: the property `attribute` of the object in its attribute `part`."""
    shown: Any = attribute
    return property(lambda facade: shown.fget(getattr(facade, part)), doc=shown.__doc__)  # type: ignore[return-value]


def value_of(path: str, doc: str | None = None) -> Any:
    """A read-only property of the facade: the value of the dotted attribute `path`."""
    return property(operator.attrgetter(path), doc=doc)


def variable_of(path: str, doc: str | None = None) -> Any:
    """As `value_of`, but writable."""
    owner, _, name = path.rpartition(".")
    find = operator.attrgetter(owner)
    return property(
        operator.attrgetter(path), lambda facade, value: setattr(find(facade), name, value), doc=doc
    )


def constant(value: Any, doc: str) -> Any:
    """A read-only property of the facade that is always `value`."""
    return property(lambda facade: value, doc=doc)
