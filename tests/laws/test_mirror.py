"""The tests mirror the source: a reader of a file finds its tests under the same name, in a folder of the same name.

A test file is named after a file of its room, or is about a behaviour that no single file has; then its first line says
which, and its name is not that of a file elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.laws.source import PACKAGE, ROOT

TESTS = ROOT / "tests"
# Rooms of tests about the project as a whole.
OTHER_ROOMS = {"laws", "docs", "examples", "benchmarks", "reliability", "xla"}


def stems(folder: Path) -> set[str]:
    """Names of all files and folders below `folder`."""
    return {path.stem for path in folder.rglob("*") if path.suffix == ".py" or path.is_dir()} - {"__init__"}


def misplaced(test: str, documented: bool, own: set[str], elsewhere: set[str]) -> str | None:
    """What is wrong with where a test file is: `test` as "data/test_order.py"; None if nothing is."""
    stem = Path(test).stem.removeprefix("test_")
    if stem in own:
        return None
    if stem in elsewhere:
        return f"{test} is named after a file of another room: move it, or name it after what it tests"
    return None if documented else f"{test} mirrors no file: its first line must say what it tests"


def found_tests() -> list[Path]:
    found = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("test_*.py"))]
    return [path for path in found if path.parts[0] not in OTHER_ROOMS]


def test_test_files_mirror_files_or_say_what_they_test() -> None:
    everywhere = stems(PACKAGE)
    found = []
    for test in found_tests():
        documented = ast.get_docstring(ast.parse((TESTS / test).read_text("utf-8"))) is not None
        room = test.parts[0] if len(test.parts) > 1 else ""
        found.append(misplaced(test.as_posix(), documented, stems(PACKAGE / room) | {room}, everywhere))
    assert len(found) > 100
    assert not any(found), "\n".join(filter(None, found))


def _folders(root: Path, files: Iterable[Path]) -> set[str]:
    return {str(path.parent.relative_to(root)) for path in files}


def test_every_room_has_tests_and_every_folder_of_tests_its_room() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    with_tests = {test.parts[0] for test in found_tests() if len(test.parts) > 1}
    assert rooms == with_tests
    sources = _folders(PACKAGE, PACKAGE.rglob("*.py"))
    assert _folders(TESTS, (TESTS / test for test in found_tests())) <= sources


@pytest.mark.parametrize(
    ("test", "documented", "says"),
    [
        ("data/test_order.py", False, None),
        ("data/test_a_behaviour.py", True, None),
        ("data/test_a_behaviour.py", False, "must say what it tests"),
        ("data/test_loop.py", True, "another room"),
    ],
)
def test_the_law_sees(test: str, documented: bool, says: str | None) -> None:
    fault = misplaced(test, documented, own={"order"}, elsewhere={"order", "loop"})
    assert fault is None if says is None else says in str(fault)
