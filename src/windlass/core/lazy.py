"""Modules whose names live elsewhere and are loaded when they are first asked for, so that importing them is cheap."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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
        value = getattr(import_uncollected(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return load


def lazy_names(
    module: str, reasons: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module whose names are defined elsewhere.

    The table of its names is the stub beside it (`.pyi`): type checkers and editors read the same imports that are made
    here at the first use of a name. `reasons`: as for `loader_of`; by default those for the names of other libraries.
    """
    homes = stub_homes(module)

    def load(name: str) -> Any:
        home = homes.get(name)
        if home == module:
            return importlib.import_module(f"{module}.{name}")
        if home is not None or reasons is not None:
            return loader_of(module, homes, reasons)(name)
        from windlass.core.outside import find_outside

        refused = find_outside("refused names")
        return loader_of(module, {}, {} if refused is None else refused.WHY)(name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes})

    return load, names, sorted(name for name, home in homes.items() if home != module)


def stub_homes(module: str) -> dict[str, str]:
    """Name -> home of the imports in a module's stub, each written as `from home import name as name`, or as
    `from module import *` for all names of another stub. Submodules have the module itself as home. Empty if there is
    no such module: the core works without the modules of aliases.
    """
    spec: Any = importlib.util.find_spec(module)
    if spec is None:
        return {}
    # By its loader, for packages in archives.
    stub = spec.loader.get_data(f"{spec.origin.removesuffix('c')}i").decode()
    homes: dict[str, str] = {}
    # No syntax tree: the module that makes it costs more than everything else that `import windlass` loads.
    for statement in f"\n{stub}".split("\nfrom ")[1:]:
        home, _, aliases = statement.partition(" import ")
        if aliases.strip() == "*":
            homes |= stub_homes(home)
            continue
        homes |= {alias.split()[-1]: home for alias in aliases.strip("(,)\n").split(",") if alias.strip()}
    return homes


def import_uncollected(module: str) -> Any:
    """Import with the garbage collector held off: a collection over all that torch made costs a third of the import."""
    with _uncollected():
        return importlib.import_module(module)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _TorchFinder(MetaPathFinder):
    """Finds torch as the finders after it do, for `import_torch_uncollected`."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        # Not those before it: of two finders that ask all others, each would ask the other.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    with _uncollected():
        execute(module)
    gc.freeze()


_TORCH = _TorchFinder()


def import_torch_uncollected() -> None:
    """From now on the first import of torch, by any module, is not interrupted by collections of garbage, and
    none looks at what it made: modules stay to the end. For processes of Windlass itself, before a user's code runs.
    """
    # A launched command asks twice: as the process that was launched, and as the command.
    if "torch" not in sys.modules and _TORCH not in sys.meta_path:
        sys.meta_path.insert(0, _TORCH)


class LazyModule:
    """A module that is imported when something of it is first asked for, and has all its names from then on.

    Stand-in for `import module` where most users of the importing file never need it. For type checkers, import the
    module under `TYPE_CHECKING`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        module = import_uncollected(self._name)
        vars(self).update({**vars(module), **vars(self)})
        return getattr(module, name)
