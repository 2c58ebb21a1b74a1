"""The stub of a module that loads its names at their first use is the table of these names, and holds nothing else."""

from __future__ import annotations

import ast
import importlib

import pytest
from tests.laws.source import Module, modules, stubs

from windlass.core.lazy import stub_homes

NAMES = [stub.name for stub in stubs()]


def _aliases(stub: Module) -> dict[str, tuple[str, str]]:
    """{name as imported: (home, name there)} by Python's own parser."""
    by_name = {stub.name: stub for stub in stubs()}
    found = {}
    for node in (node for node in stub.tree.body if isinstance(node, ast.ImportFrom)):
        home = node.module or ""
        if [alias.name for alias in node.names] == ["*"]:
            found |= _aliases(by_name[home])
        found |= {alias.asname: (home, alias.name) for alias in node.names if alias.asname is not None}
    return found


@pytest.mark.parametrize("stub", stubs(), ids=NAMES)
def test_names_are_loaded_from_where_type_checkers_find_them(stub: Module) -> None:
    aliases = _aliases(stub)
    assert all(name == there for name, (_, there) in aliases.items()), "others are private in a stub"
    module = importlib.import_module(stub.name)
    assert stub_homes(stub.name) == {name: home for name, (home, _) in aliases.items()}
    for name, (home, _) in aliases.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
    assert {name for name, (home, _) in aliases.items() if home != stub.name} <= {*module.__all__}
    assert {*aliases} <= {*dir(module)}


def test_every_module_that_loads_names_has_a_stub() -> None:
    """And no other module: type checkers would not read its code."""
    lazy = [m.name for m in modules() if "lazy_names(__name__" in m.path.read_text("utf-8")]
    assert lazy == NAMES


def test_what_else_is_in_a_stub() -> None:
    found = {
        (stub.name, ast.unparse(node))
        for stub in stubs()
        for node in stub.tree.body
        if not isinstance(node, ast.ImportFrom)
    }
    assert found == {
        ("windlass", "__version__: str"),
        ("windlass.utils", "import windlass.core.logs as _logs"),
        ("windlass.utils", "logging = _logs"),
    }
