"""A name means one thing: no two classes of one name, and no two files.

Modules at the top and in `utils` have the names that scripts import from their old library, whatever else has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest
from tests.laws.source import Module, classes, modules

CLASSES: dict[str, str] = {}
FILES = {
    "registry": "optimizers and schedules are families alike, each with its registry",
    "sharded": "tensors in parts over ranks, and files of such parts",
}


def is_free(module: Module) -> bool:
    """Whether scripts choose this module's names."""
    is_top_file = module.name.count(".") == 1 and module.path.name != "__init__.py"
    return is_top_file or module.room == "utils"


def twice(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """name -> places, of (name, place) pairs, for names with several places."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, place in names:
        found[name].append(place)
    return {name: places for name, places in found.items() if len(places) > 1}


def test_no_two_classes_of_one_name() -> None:
    named = [(name, m.where) for m in modules() if not is_free(m) for name, _ in classes(m)]
    assert len(named) > 100
    assert twice(named).keys() == CLASSES.keys(), twice(named)


def test_no_two_files_of_one_name() -> None:
    named = [(m.path.stem, m.where) for m in modules() if not is_free(m) and m.path.stem != "__init__"]
    assert twice(named).keys() == FILES.keys(), twice(named)


@pytest.mark.parametrize(("names", "found"), [("a b c", []), ("a b a", ["a"])])
def test_the_law_sees(names: str, found: list[str]) -> None:
    assert list(twice((name, str(place)) for place, name in enumerate(names.split()))) == found
