"""`main_process_first` with real processes: the order holds, and a failure of the first does not hang the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch

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


def _launch(tmp_path: Path, ending: str, code: int) -> str:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    (tmp_path / "cache").mkdir()
    return launch(2, script, tmp_path / "cache", ending, expect=code)


@pytest.mark.dist
def test_the_main_process_goes_first(tmp_path: Path) -> None:
    _launch(tmp_path, "work", 0)
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["0", "1", "2"]


@pytest.mark.dist
def test_a_failure_of_the_main_process_ends_all(tmp_path: Path) -> None:
    assert "disk full" in _launch(tmp_path, "fail", 1)
