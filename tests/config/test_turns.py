"""`main_process_first` with real processes: the order holds, and a failure of the first does not hang the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, sys
from windlass.config.arguments import TrainingArguments

args = TrainingArguments("out", use_cpu=True, ddp_timeout=60)
cache = sys.argv[1]
for turn in range(3):
    with args.main_process_first(local=turn != 1, desc="tokenising"):
        path = os.path.join(cache, str(turn))
        if args.process_index == 0:
            if turn == 2 and sys.argv[2] == "fail":
                raise OSError("disk full")
            open(path, "x").close()
        else:
            assert os.path.exists(path), "came before the main process"
import torch.distributed as dist
dist.init_process_group("gloo")  # the store that the turns used does not stand in the way
dist.barrier()
dist.destroy_process_group()
"""


def _launch(tmp_path: Path, ending: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    (tmp_path / "cache").mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return subprocess.run(
        [*launcher, str(script), str(tmp_path / "cache"), ending],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.dist
def test_the_main_process_goes_first(tmp_path: Path) -> None:
    result = _launch(tmp_path, "work")
    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["0", "1", "2"]


@pytest.mark.dist
def test_a_failure_of_the_main_process_ends_all(tmp_path: Path) -> None:
    result = _launch(tmp_path, "fail")
    assert result.returncode != 0
    assert "disk full" in result.stderr
