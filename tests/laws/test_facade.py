"""Law 9: `Trainer` is a facade. State lives in objects with one owner each, and nothing below the facade knows it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.laws.source import modules

from windlass import Trainer
from windlass.trainer.trainer_names import TrainerNames

FACADE = "windlass.trainer.trainer"


def assigned(tree: ast.AST) -> set[str]:
    """The attributes that methods assign on `self`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == "self"
    }  # fmt: skip


def class_of(path: Path, name: str) -> ast.ClassDef:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def source_of(cls: type) -> Path:
    import inspect

    return Path(inspect.getfile(cls))


def test_one_class_stands_between_trainer_and_object() -> None:
    assert Trainer.__mro__ == (Trainer, TrainerNames, object)


def test_the_base_holds_no_state() -> None:
    """What it assigns are properties of other objects, through setters."""
    setters = {"args", "processing_class"}
    assert assigned(class_of(source_of(TrainerNames), "TrainerNames")) <= setters


def test_a_trainer_has_at_most_thirty_attributes() -> None:
    names = assigned(class_of(source_of(Trainer), "Trainer"))
    assert len(names) <= 30, sorted(names)


def test_nothing_below_imports_the_facade() -> None:
    from tests.laws.source import imports

    above = ("/cli/", "/finetuning/")
    users = {
        m.where
        for m in modules()
        for item in imports(m)
        if item.module == FACADE and not any(room in m.where for room in above)
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
    knowing = {Path(m.where).name for m in below if any(map(_knows_trainer, ast.walk(m.tree)))}
    assert knowing <= allowed, knowing - allowed


@pytest.mark.parametrize(
    ("source", "expected"),
    [("self.a = self.b.c = 1", {"a"}), ("self.a, self.d = 1, 2", {"a", "d"}), ("self.a += 1", {"a"})],
)
def test_the_law_sees(source: str, expected: set[str]) -> None:
    assert assigned(ast.parse(source)) == expected
