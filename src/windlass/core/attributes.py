"""Attributes of a module, a class or an object for a while; the configuration of a model; what a function takes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any


def text_config(model: Any) -> Any:
    """The configuration of a model; of one that reads images and the like, that of its text; None if it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@contextlib.contextmanager
def attributes_of(owner: Any, **values: Any) -> Iterator[None]:
    """Within the body, attributes of `owner`, which has no slots, have these values. One that it inherits is inherited
    again afterwards. Raises AttributeError if it lacks one.
    """
    for name in values:
        inspect.getattr_static(owner, name)
    # A class method as what makes it one.
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def keep_properties(cls: type, owner: type) -> None:
    """Have the properties of `owner` that can be assigned on its subclass `cls`, where a class between them has a
    plain value.
    """
    assigned = {name: p for name, p in vars(owner).items() if isinstance(p, property) and p.fset is not None}
    for name, value in assigned.items():
        if not hasattr(inspect.getattr_static(cls, name), "__get__"):
            setattr(cls, name, value)


def required_by_position(function: Callable[..., Any]) -> int:
    """The number of arguments that a call has to pass by position."""
    parameters = inspect.signature(function).parameters.values()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in by_position for p in parameters)


def accepts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return True if a call with these arguments fits the signature of a function in Python."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if a callable accepts the keyword `name`."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature: the call raises if it does not
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
