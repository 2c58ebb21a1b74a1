"""A disk that is really full costs the checkpoints of that time, and is said loudly; the run goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import run_to_its_end


def _can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    return subprocess.run(mount, capture_output=True, timeout=20).returncode == 0


def test_a_full_disk_costs_its_checkpoints_alone(tmp_path: Path) -> None:
    """A disk without room, and one that refuses in the middle of a file; in the background, and at once."""
    if not _can_mount(tmp_path):
        pytest.skip("needs a mount namespace of its own")
    script = Path(__file__).parent / "full_disk.py"
    code, said = run_to_its_end(["unshare", "-m", sys.executable, str(script), str(tmp_path)], timeout=200)
    assert code == 0, said[-4000:]
    told = json.loads(next(line for line in reversed(said.splitlines()) if line.startswith("[")))
    assert told == [{"saved": [1, 5, 6], "same": True, "left": []}] * 4
    lost = [line for line in said.splitlines() if "WAS NOT SAVED" in line]
    assert [line.split("CHECKPOINT ")[1][0] for line in lost] == ["2", "3", "4"] * 4
    assert sum("bytes and 0 are free" in line for line in lost) == 6, "found out before anything is written"
    assert sum("File too large" in line for line in lost) == 6
    assert all("checkpoint-1 is still whole" in line for line in lost), "the one that stands is named"
