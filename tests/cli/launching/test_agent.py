"""What the launcher makes of a process that ends between two of its looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import end_of

LATE = Path(__file__).with_name("late_launcher.py")
SCRIPT = """
import os, sys, time
from pathlib import Path
from windlass.core.errors import Preempted
if sys.argv[1] == "fails":
    if os.environ["RANK"] == "1":
        raise ValueError("row 17 is damaged")
    time.sleep(1000)
if os.environ["RANK"] == "0":
    while not Path(os.environ["LOOKED"]).exists():
        time.sleep(0.01)
raise Preempted(3, None)
"""


def launched(folder: Path, how: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environ = {"WINDLASS_HOME": "/nowhere", "LOOKED": str(folder / "looked")}
    return end_of(LATE, "launch", "--cpu", "--num_processes", 2, script, how, timeout=100, environ=environ)


@pytest.mark.dist
def test_a_failure_between_two_looks_is_reported(tmp_path: Path) -> None:
    code, said = launched(tmp_path, "fails")
    assert code == 1
    assert "the job failed: rank 1 raised ValueError: row 17 is damaged" in said


@pytest.mark.dist
def test_a_rank_that_left_between_two_looks_leaves_the_others_time_to_save(tmp_path: Path) -> None:
    code, said = launched(tmp_path, "leaves")
    assert code == 75, said
    assert "the job saved and exited at step 3, as requested" in said
