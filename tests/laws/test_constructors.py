"""Law: an inner class has few constructor arguments and few attributes. One with many wires others by hand.

The parts of a run are given one `RunContext`. What scripts construct has the arguments that their library documents.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.laws.source import modules, nodes

ARGUMENTS, ATTRIBUTES = 6, 18

# Their arguments are those that scripts pass, by the names of other libraries and of papers.
FOR_SCRIPTS = ("compat", "optim.optimizers", "optim.schedules", "callbacks.trackers")
FACADES = {"Trainer", "SFTTrainer", "ReferenceTrainer", "RewardTrainer", "Accelerator"}
# Class -> number of its arguments. Lower a number with the code, and take away what keeps the law.
NOT_YET = {
    "StagedCheckpoint": 8,  # rank, world, files and disks are those of its store
    "PreparedLoader": 8,
}


def arguments(owner: ast.ClassDef) -> int:
    """The number of arguments of the constructor that a class defines, without `self`, `*args` and `**kwargs`."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1
    return 0


def attributes(owner: ast.ClassDef) -> set[str]:
    """The attributes that methods assign on `self`."""
    return {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _inner() -> Iterator[ast.ClassDef]:
    for module in modules():
        if not module.name.startswith(tuple(f"windlass.{room}" for room in FOR_SCRIPTS)):
            yield from (
                node
                for node in nodes(module.tree)
                if isinstance(node, ast.ClassDef) and node.name not in FACADES
            )


# What an update reads is bound once, so that it costs no chain of properties each time.
BOUND = {"Loop": 19}


def test_constructors_take_few_arguments() -> None:
    many = {owner.name: count for owner in _inner() if (count := arguments(owner)) > ARGUMENTS}
    assert many == NOT_YET


def test_objects_have_few_attributes() -> None:
    many = {owner.name: sorted(names) for owner in _inner() if len(names := attributes(owner)) > ATTRIBUTES}
    assert {owner: len(names) for owner, names in many.items()} == BOUND


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("class A:\n    def __init__(self, a, /, b, *c, d=1, **e): ...", 3),
        ("class A:\n    def start(self, a): ...", 0),
    ],
)
def test_the_law_counts_arguments(source: str, count: int) -> None:
    (owner,) = ast.parse(source).body
    assert isinstance(owner, ast.ClassDef)
    assert arguments(owner) == count


def test_the_law_counts_attributes() -> None:
    (owner,) = ast.parse(
        "class A:\n    def f(self):\n        self.a, self.b = 1, 2\n        self.a += other.c"
    ).body
    assert isinstance(owner, ast.ClassDef)
    assert attributes(owner) == {"a", "b"}
