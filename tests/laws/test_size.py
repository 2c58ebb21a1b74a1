"""Law 2: no file over 500 lines, no function over 60.

The two facades may be longer: each has, in one file, every name that a script reads, calls or overrides, with its
signature and docstring. Splitting them would separate names that belong together.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

from tests.laws.source import PACKAGE, ROOT, functions, length, modules, other_files

FILE_LINES, FUNCTION_LINES = 500, 60
FACADES = {"src/windlass/trainer/trainer.py", "src/windlass/accelerator/accelerator.py"}
FILES = [*sorted(PACKAGE.rglob("*.py")), *other_files()]


def _lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_no_long_file() -> None:
    long = {str(p.relative_to(ROOT)): _lines(p) for p in FILES if _lines(p) > FILE_LINES}
    assert long.keys() <= FACADES, long


def test_no_long_function() -> None:
    # Other laws have parsed those of the package. Of the others one tree is held at a time: garbage collection of all
    # takes four times as long as parsing them.
    trees = itertools.chain(
        ((module.path, module.tree) for module in modules()),
        ((path, ast.parse(path.read_text("utf-8"))) for path in other_files()),
    )
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": length(node)
        for path, tree in trees
        for node in functions(tree)
        if length(node) > FUNCTION_LINES
    }
    assert not long, long
