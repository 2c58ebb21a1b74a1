"""Arguments have a type: mypy checks what reads an option, and refuses a name that is not an option."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator

import pytest
from tests.laws.source import modules, nodes

from windlass import Accelerator

NAMES = ("args", "training_args")


def untyped(tree: ast.AST) -> Iterator[int]:
    """The lines on which a parameter or an attribute called `args` may be anything, or a function that returns it."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            pairs = [(one.arg, one.annotation) for one in given]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            pairs = [(getattr(node.target, "id", getattr(node.target, "attr", "")), node.annotation)]
        else:
            continue
        for name, annotation in pairs:
            if name in NAMES and annotation is not None and ast.unparse(annotation) in ANYTHING:
                yield annotation.lineno


ANYTHING = ("Any", "Any | None", "Callable[[], Any]")


def test_no_arguments_of_any_type() -> None:
    found = [f"{module.where}:{line}" for module in modules() for line in untyped(module.tree)]
    assert not found, "\n".join(found)


def test_every_argument_of_an_accelerator_has_a_type() -> None:
    types = typing.get_type_hints(Accelerator.__init__)
    assert types.keys() >= set(inspect.signature(Accelerator).parameters)
    assert not [name for name, found in types.items() if "Any" in str(found)]


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def run(args: Any) -> None: ...", True),
        ("def run(*, args: Callable[[], Any]) -> None: ...", True),
        ("class Run:\n    args: Any", True),
        ("def run(args: TrainingArguments, *rest: Any) -> None: ...", False),
        ("def run(*args: Any, **kwargs: Any) -> None: ...", False),
    ],
)
def test_the_law_sees_what_is_not_typed(source: str, wrong: bool) -> None:
    assert bool(list(untyped(ast.parse(source)))) is wrong
