"""What the tests start for themselves ends with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import run_to_its_end

# As torch's launcher does: its processes lead sessions of their own.
LAUNCHER = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_job_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_to_its_end([sys.executable, "-c", LAUNCHER, str(note)], timeout=3)
    state = Path("/proc", note.read_text(), "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
