"""What is written here stands on its own: no ticket numbers, no paths of one machine, no left-over notes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.laws.source import ROOT

# Spelt in pieces, so that this file does not name them itself.
FORBIDDEN = [
    r"/" + r"work/", r"/" + r"root/", r"/" + r"opt/(wheels|pypi)", r"/" + r"home/\w+/", r"/" + r"Users/\w+/",
    r"(?i)\bissue" + r" *#?\d", r"(?i)\b(fixes|closes|resolves) #" + r"\d",
    r"\bTODO" + r"\b", r"\bFIXME" + r"\b", r"\bXXX" + r"\b",
]  # fmt: skip
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".json", ".sh", ""}


def _tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in done.stdout.splitlines()]


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_such_words(pattern: str) -> None:
    found = []
    for path in _tracked():
        if path.suffix in TEXT and path.is_file():
            text = path.read_text("utf-8")
            found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in re.finditer(pattern, text)]
    assert not found, found


def test_no_binary_or_large_file() -> None:
    """Nothing that could not be reviewed: checkpoints, data and archives stay out."""
    large = {
        str(p.relative_to(ROOT)): p.stat().st_size
        for p in _tracked()
        if p.is_file() and p.stat().st_size > 300_000
    }
    assert not large, large
