"""Every file and folder that the pages for contributors name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a path in backticks may be relative to.
HOMES = ("", "src", "src/windlass", "tests", "tests/laws", "docs")
# Paths of a user's machine or of a run, and names of other programs.
NOT_OURS = {
    "../shared/data", "trainer_state.json", "training.png", "report.html", "metrics.jsonl", ".metadata", "site/",
}  # fmt: skip
_IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
_FILE = re.compile(r".*\.(py|md|json|yaml|toml|svg)")


def paths_of(page: str) -> set[str]:
    """Words in backticks that are paths: with a slash, or with the ending of a file of the repository."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    words = {word for quoted in _IN_BACKTICKS.findall(text) for word in quoted.split()}
    return {w for w in words if _PATH.fullmatch(w) and ("/" in w or _FILE.fullmatch(w)) and w not in NOT_OURS}


def exists(path: str) -> bool:
    if any((ROOT / home / path).exists() for home in HOMES):
        return True
    # In a sentence about a room its files are named alone; tables of objects name rooms once.
    return ("/" not in path and any((ROOT / "src").rglob(path))) or any((ROOT / "tests").rglob(path))


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "README.md"])
def test_every_named_path_exists(page: str) -> None:
    named = paths_of(page)
    assert page == "README.md" or len(named) > 20, "the pattern finds them"
    assert not sorted(path for path in named if not exists(path))


def test_a_path_that_does_not_exist_is_found() -> None:
    assert not exists("metrics/gather.py")
    assert exists("engine/loop.py")
