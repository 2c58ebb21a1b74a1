"""Modules whose names live elsewhere and are loaded when they are first asked for, so that importing them is cheap."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def reverse(table: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """{key: names} as {name: key}."""
    return {name: key for key, names in table.items() for name in names}


def loader_of(
    module: str, homes: Mapping[str, str], reasons: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """The `__getattr__` of `module`.

    Args:
        module: its full name.
        homes: name -> the module that defines it.
        reasons: name that scripts know and Windlass does not have -> why.
    """

    def load(name: str) -> Any:
        if reasons and name in reasons:
            # Not an AttributeError: `from module import name` would swallow its words.
            raise ImportError(f"{module} has no {name}: {reasons[name]}")
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(_import(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return load


def _import(module: str) -> Any:
    """Import with the garbage collector held off: a collection over all that torch made costs a third of the import."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()


class LazyModule:
    """A module that is imported when something of it is first asked for.

    Stand-in for `import module` where most users of the importing file never need it. For type checkers, import the
    module under `TYPE_CHECKING`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(_import(self._name), name)
        setattr(self, name, value)
        return value
