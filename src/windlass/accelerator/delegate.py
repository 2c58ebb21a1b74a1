"""How `Accelerator` passes calls on to the objects that it consists of, signatures and docstrings included."""

from __future__ import annotations

import functools
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


def property_of(part: str, attribute: Any) -> Any:
    """A property of the facade that reads (and sets, if it can be set) the property `attribute` of its `part`."""

    def read(facade: Any) -> Any:
        return attribute.fget(getattr(facade, part))

    def write(facade: Any, value: Any) -> None:
        attribute.fset(getattr(facade, part), value)

    return property(read, write if attribute.fset is not None else None, doc=attribute.__doc__)


def attribute_of(part: str, name: str) -> Any:
    """A property of the facade that reads and sets the attribute `name` of its `part`."""

    def read(facade: Any) -> Any:
        return getattr(getattr(facade, part), name)

    def write(facade: Any, value: Any) -> None:
        setattr(getattr(facade, part), name, value)

    return property(read, write)
