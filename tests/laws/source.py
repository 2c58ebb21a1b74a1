"""The source tree as the laws see it: modules, their imports (lazy ones too), their functions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "windlass"


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, the names taken from it, the line, whether import time pays for it, and
    whether only type checkers import it.
    """

    module: str
    names: tuple[str, ...]
    line: int
    at_import: bool
    types_only: bool = False


@dataclass(frozen=True)
class Module:
    """One file of `src/windlass`, by its dotted name."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """First part under `windlass`: a package, or the stem of a single file. Empty for the root itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> tuple[Module, ...]:
    files = sorted(PACKAGE.rglob("*.py"))
    return tuple(Module(module_name(p), p, ast.parse(p.read_text("utf-8"), str(p))) for p in files)


@functools.cache
def stubs() -> tuple[Module, ...]:
    """The tables of names that modules load at their first use, which are stubs for type checkers too."""
    files = sorted(PACKAGE.rglob("*.pyi"))
    return tuple(Module(module_name(p), p, ast.parse(p.read_text("utf-8"), str(p))) for p in files)


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """As `ast.walk`, which is several times slower than the look that each of twenty laws takes at all of them."""
    return tuple(ast.walk(tree))


def by_name() -> dict[str, Module]:
    return {m.name: m for m in modules()}


def other_files() -> list[Path]:
    return [p for folder in ("tests", "benchmarks") for p in sorted((ROOT / folder).rglob("*.py"))]


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    keep = len(parts) - node.level + (module.path.name == "__init__.py")
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def _is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return getattr(test, "id", None) == "TYPE_CHECKING" or getattr(test, "attr", None) == "TYPE_CHECKING"


def _statements(
    node: ast.AST, at_import: bool = True, types_only: bool = False
) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every node below `node`, whether it runs when the module is imported, and whether for type checkers only."""
    for child in ast.iter_child_nodes(node):
        for_types = types_only or _is_type_checking(child)
        runs = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, runs and not for_types, for_types
        yield from _statements(child, runs and not for_types, for_types)


def _dynamic(node: ast.AST) -> str | None:
    """The module that `require("x", ...)` or `importlib.import_module("x")` names."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
    first = node.args[0]
    if called not in ("require", "import_module", "__import__") or not isinstance(first, ast.Constant):
        return None
    return first.value if isinstance(first.value, str) else None


@functools.cache
def imports(module: Module) -> tuple[Import, ...]:
    """All imports of a file: at its top, inside functions, under TYPE_CHECKING, and by name at run time."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[Import]:
    for node, *when in _statements(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, *when)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(_absolute(module, node), names, node.lineno, *when)
        elif name := _dynamic(node):
            yield Import(name, (), node.lineno, *when)  # type: ignore[attr-defined]


def windlass_targets(found: Import, known: dict[str, Module]) -> set[str]:
    """The files of Windlass that an import reaches: `from package import module` means the module."""
    if found.module != "windlass" and not found.module.startswith("windlass."):
        return set()
    inner = {f"{found.module}.{name}" for name in found.names}
    submodules = inner & known.keys()
    return submodules if submodules and submodules == inner else submodules | {found.module}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    # What holds statements: no expression does, and most nodes are in one.
    holders: list[ast.AST] = [tree]
    for holder in holders:
        for node in ast.iter_child_nodes(holder):
            if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
                holders.append(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end of the body, docstring included."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def classes(module: Module) -> Iterator[tuple[str, set[str]]]:
    """(name, base names) of each class; a dotted base counts by its last part."""
    for node in nodes(module.tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, {getattr(b, "id", None) or getattr(b, "attr", "") for b in node.bases}
