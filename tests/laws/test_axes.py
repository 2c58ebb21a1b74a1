"""Arithmetic with a number or a position of ranks names the view that it means: see docs/architecture.md.

While only data is divided over ranks, the size of the job is the number of ranks with data, the number by which a loss
is multiplied, and the number of ranks that write a checkpoint. With another axis these are different numbers. So what
is computed reads `data_ranks.size` or `loss_ranks.rank`, never `gang.size` or `world.rank`. Whether a process is alone
(`size == 1`) or the first one (`rank == 0`) may be asked of any gang.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.laws.source import modules, nodes

from windlass.core.mesh import VIEWS

# `dist/` makes gangs of the world, and `core/` describes it.
ROOMS = ("dist", "core")
NAMED = {f"{view}_ranks" for view in VIEWS}
BARE = {"gang", "world"}
CALLS = {"get_world_size", "get_rank"}
COMPUTING = {"range", "divmod", "min", "max"}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)

EXCEPT = {
    "src/windlass/cli/launching": "the launcher numbers the processes of a job, and divides them among machines",
}


def last_name(node: ast.expr) -> str:
    """The last name of a dotted expression, without the underscore of a private attribute."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_")


def is_bare(node: ast.AST) -> bool:
    """Return True for a number or a position of ranks that names no view."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in CALLS
    if isinstance(node, ast.Attribute) and node.attr in ("size", "rank"):
        return last_name(node.value) in BARE
    if isinstance(node, ast.Attribute) and node.attr == "world_size":
        return last_name(node.value) == "args"  # that of a checkpoint is the number of ranks that wrote it
    return isinstance(node, ast.Name | ast.Attribute) and last_name(node) in ("world", "world_size")


def operands(node: ast.AST) -> list[ast.expr]:
    """The expressions that `node` computes with; none if it does not compute."""
    match node:
        case ast.BinOp(left, op, right) if isinstance(op, ARITHMETIC):
            is_text = isinstance(left, ast.JoinedStr | ast.Constant) and not is_number(left)
            return [] if is_text else [left, right]
        case ast.AugAssign(target, op, value) if isinstance(op, ARITHMETIC):
            return [target, value]
        case ast.Compare(left, _, comparators):
            compared = [left, *comparators]
            return [] if any(isinstance(side, ast.Constant) for side in compared) else compared
        case ast.Call(function, arguments) if last_name(function) in COMPUTING:
            return arguments
    return []


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def unnamed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every number of ranks that is computed with and names no view, and of every parameter of type
    `Gang` with another name than `gang` or that of a view.
    """
    for node in nodes(tree):
        for side in operands(node):
            if is_bare(side):
                yield side.lineno, ast.unparse(side)
        if isinstance(node, ast.arg) and is_gang(node.annotation) and node.arg not in {*NAMED, "gang"}:
            yield node.lineno, f"{node.arg}: Gang"


def is_gang(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).removesuffix(" | None") == "Gang"


def test_arithmetic_with_ranks_names_the_view() -> None:
    found = [
        f"{module.where}:{line} {text}"
        for module in modules()
        if module.room not in ROOMS and not any(module.where.startswith(where) for where in EXCEPT)
        for line, text in unnamed(module.tree)
    ]
    assert not found, "take data_ranks, loss_ranks, model_ranks or all_ranks instead:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "samples = micro * gang.size",
        "share = loss * self._gang.size / total",
        "start = world.rank * each",
        "rows //= self._world",
        "return [value for rank in range(gang.size)]",
        "each, extra = divmod(length, args.world_size)",
        "mine = gang.rank < extra",
        "if batches == self._world: pass",
        "micro = samples // dist.get_world_size()",
        "def deal(rows: int, peers: Gang) -> int: ...",
        "def deal(rows: int, peers: Gang | None = None) -> int: ...",
    ],
)
def test_the_law_sees_arithmetic_that_names_no_view(line: str) -> None:
    assert len(list(unnamed(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "samples = micro * data_ranks.size",
        "share = loss * self._loss_ranks.size / total",
        "return [value for rank in range(self._all_ranks.size)]",
        "alone = gang.size == 1 or world.rank > 0",
        "text = 'of %d processes' % gang.size",
        "limit = args.batch_size_of(world) + 1",
        "def deal(rows: int, data_ranks: Gang, gang: Gang | None) -> int: ...",
    ],
)
def test_the_law_allows_a_view_and_what_is_no_arithmetic(line: str) -> None:
    assert not list(unnamed(ast.parse(line)))
