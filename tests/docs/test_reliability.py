"""The page on reliability names tests: they are there."""

from __future__ import annotations

import re

import pytest
from tests.laws.source import ROOT

NAMED = sorted(
    set(re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", (ROOT / "docs" / "reliability.md").read_text("utf-8")))
)


def test_it_names_some() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_it_names_is_there(file: str, name: str) -> None:
    text = (ROOT / "tests" / file).read_text("utf-8")
    assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
