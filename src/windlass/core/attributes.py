"""Attributes of an object for a while; methods that scripts replace; the configuration of a model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
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


def replaced(instance: object, *names: str) -> frozenset[str]:
    """The methods of these names that a script replaces: in a subclass, on the instance, or by assigning to a class of
    Windlass. An override in a class of Windlass is none.
    """
    return frozenset(name for name in names if name in vars(instance) or _is_foreign(type(instance), name))


def _is_foreign(cls: type, name: str) -> bool:
    value: Any = inspect.getattr_static(cls, name, None)
    if value is None:
        return False
    function: Any = getattr(value, "fget", None) or getattr(value, "__func__", value)
    # Not `__module__`, which `functools.wraps` copies from the method that a script wraps.
    where = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
    return not str(where).startswith("windlass.")
