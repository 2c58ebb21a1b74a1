"""Law 9: `Trainer` is a facade. State lives in objects with one owner each, and nothing below the facade knows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.laws.source import modules, nodes

from windlass import Trainer

FACADE = "windlass.trainer.trainer"
# They take a Trainer to bind its methods or read its attributes, so type checkers import its class there.
BINDERS = {f"windlass.trainer.{name}" for name in ("hooks", "preparation", "compare_ranks")}
_ATTRIBUTE_PATH = re.compile(r"_\w+(\.\w+)*|\w+(\.\w+)+")


def assigned(tree: ast.AST) -> set[str]:
    """The attributes that methods assign on `self`."""
    return {
        node.attr
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == "self"
    }  # fmt: skip


def class_of(path: Path, name: str) -> ast.ClassDef:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def source_of(cls: type) -> Path:
    import inspect

    return Path(inspect.getfile(cls))


def test_trainer_has_no_base_class() -> None:
    """All of it is in one file: what scripts read, call and override."""
    assert Trainer.__mro__ == (Trainer, object)


def test_a_trainer_has_at_most_thirty_attributes() -> None:
    names = assigned(class_of(source_of(Trainer), "Trainer"))
    assert len(names) <= 30, sorted(names)


def test_nothing_below_imports_the_facade() -> None:
    from tests.laws.source import imports

    users = {
        m.where
        for m in modules()
        for item in imports(m)
        if item.module == FACADE and m.room not in ("recipes", "cli", "compat", "finetuning")
        if not (m.name in BINDERS and item.types_only)
    }
    assert users <= {"src/windlass/__init__.py"}, users


def _knows_trainer(node: ast.AST) -> bool:
    if isinstance(node, ast.arg):
        return node.arg == "trainer"
    return isinstance(node, ast.Attribute) and node.attr == "_trainer"


def test_only_hooks_reach_up() -> None:
    """A parameter or attribute named `trainer` is found where methods are bound, and nowhere below."""
    allowed = {"hooks.py", "preparation.py", "compare_ranks.py", "defaults.py"}
    below = [m for m in modules() if m.where.startswith("src/windlass/trainer/")]
    knowing = {Path(m.where).name for m in below if any(map(_knows_trainer, nodes(m.tree)))}
    assert knowing <= allowed, knowing - allowed


@pytest.mark.parametrize(
    ("source", "expected"),
    [("self.a = self.b.c = 1", {"a"}), ("self.a, self.d = 1, 2", {"a", "d"}), ("self.a += 1", {"a"})],
)
def test_the_law_sees(source: str, expected: set[str]) -> None:
    assert assigned(ast.parse(source)) == expected


def delegated_by_strings(tree: ast.AST) -> Iterator[int]:
    """Lines of class bodies that assign the result of a call with an attribute path in a string."""
    for owner in nodes(tree):
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            first = value.args[0] if isinstance(value, ast.Call) and value.args else None
            text = first.value if isinstance(first, ast.Constant) else None
            if isinstance(text, str) and _ATTRIBUTE_PATH.fullmatch(text):
                yield node.lineno


def test_names_are_delegated_by_properties_and_methods() -> None:
    """mypy checks `return self._setup.device`. It cannot check `device = value_of("_setup.device")`."""
    found = [f"{m.where}:{line}" for m in modules() for line in delegated_by_strings(m.tree)]
    assert not found, found


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ('device = value_of("_setup.device")', True),
        ('device: int = value_of("setup.device", "The device.")', True),
        ('prepare = method_of("_preparer", Preparer.prepare)', True),
        ('folder: str = setting("", "A folder.")', False),
        ('loss = TypeVar("loss")', False),
    ],
)
def test_the_law_sees_delegation_by_strings(body: str, seen: bool) -> None:
    assert bool(list(delegated_by_strings(ast.parse(f"class Facade:\n    {body}")))) == seen
