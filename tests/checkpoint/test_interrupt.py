from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.dist
def test_a_rank_that_is_interrupted_in_a_save_leaves_nobody_waiting(tmp_path: Path, root: Path) -> None:
    """The group's own time-out is far beyond this test's: waiting for it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(root / "tests" / "checkpoint" / "gloo_interrupt.py"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command + script, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(2)]
    ways = ["KeyboardInterrupt", "SystemExit", "KeyboardInterrupt"]
    assert results[0] == [["checkpoint-1", *ways, None, None, None, "checkpoint-3"], [1]]
    assert results[1] == [["checkpoint-1", None, None, None, *ways, "checkpoint-3"], [1]]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-3"]
