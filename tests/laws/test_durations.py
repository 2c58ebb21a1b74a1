"""The time of the default tests is recorded, and has a budget."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.durations import FILE
from tests.laws.source import ROOT

# Seconds of all tests together, three at a time on two cores with nothing else to do. Lower it with the record.
BUDGET = 1900
# No file of tests takes more than this share of all.
SHARE = 0.1


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def test_the_suite_keeps_to_its_budget(record: dict[str, Any]) -> None:
    assert record["total"] <= BUDGET
    assert record["total"] == pytest.approx(sum(record["files"].values()), rel=0.01)


def test_no_file_takes_too_much(record: dict[str, Any]) -> None:
    large = {name: spent for name, spent in record["files"].items() if spent > SHARE * record["total"]}
    assert not large, large


def test_the_record_is_of_these_tests(record: dict[str, Any]) -> None:
    """It is taken again when files of tests come or go: a few may have done so since."""
    present = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(record["files"].keys() ^ present) <= 0.1 * len(present)
