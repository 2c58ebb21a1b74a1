"""Law: the path of an update and of a save through the package does not grow longer.

The bounds are what was reached: lower them with the code. What runs is printed by `benchmarks/call_path.py --list`.
"""

from __future__ import annotations

import sys

import pytest
from tests.laws.source import ROOT

UPDATE_FILES, UPDATE_CALLS = 30, 85
SAVE_FILES = 45


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from call_path import measure  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    found: dict[str, int] = measure()
    return found


def test_an_update(measured: dict[str, int]) -> None:
    assert measured["update_files"] <= UPDATE_FILES
    assert measured["update_calls"] <= UPDATE_CALLS


def test_a_save(measured: dict[str, int]) -> None:
    assert measured["save_files"] <= SAVE_FILES


def test_the_law_sees(measured: dict[str, int]) -> None:
    """A count that missed the package, or its threads, would hold any bound."""
    assert measured["update_files"] > 15
    assert measured["update_calls"] > 60
    assert measured["save_files"] > 30
