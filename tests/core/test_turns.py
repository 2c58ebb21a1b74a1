"""`main_process_first` with real processes: the order holds, and a failure of the first does not hang the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import ROOT, launch

_SCRIPT = """
import os, sys
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import WindlassError

args = TrainingArguments("out", use_cpu=True, ddp_timeout=60)
cache = sys.argv[1]
if sys.argv[2] == "report":
    try:
        with args.main_process_first(desc="tokenising"):
            raise OSError("disk full")
    except (OSError, WindlassError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\\n")
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


@pytest.mark.dist
def test_the_others_end_with_an_error_that_the_command_line_shows_in_one_line(tmp_path: Path) -> None:
    said = _launch(tmp_path, "report", 0)
    assert sorted(line for line in said.splitlines() if "Error: " in line) == [
        "OSError: disk full",
        "PeerError: the main process failed at 'tokenising'; see its own error",
    ]


_SLOW = """
import os, sys, time
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import PeerError

args = TrainingArguments("out", use_cpu=True, ddp_timeout=1)
try:
    with args.main_process_first(desc="tokenising"):
        while not os.path.exists("given-up"):
            time.sleep(0.01)
except PeerError as error:
    sys.stdout.write(f"{error}\\n")
    open("given-up", "x").close()
"""
_GONE = """
import os, sys
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import PeerError

args = TrainingArguments("out", use_cpu=True, ddp_timeout=60)
try:
    with args.main_process_first(desc="tokenising"):
        os._exit(0)  # as one that is killed
except PeerError as error:
    sys.stdout.write(f"{error}\\n")
"""


@pytest.mark.dist
def test_a_wait_that_is_too_long_names_what_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SLOW)
    said = launch(2, tmp_path / "script.py", cwd=tmp_path)
    assert "timed out waiting for the main process, which has not ended 'tokenising' after 1 s" in said


@pytest.mark.dist
def test_the_others_of_a_main_process_that_is_gone_say_where(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_GONE)
    said = launch(2, tmp_path / "script.py", cwd=tmp_path)
    assert "connection closed by the main process, before it ended 'tokenising'" in said


_RESTARTED = """
import os, sys, time
from windlass.config.arguments import TrainingArguments
args = TrainingArguments("out", use_cpu=True, ddp_timeout=60)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for turn in range(2):
    path = f"attempt-{attempt}-turn-{turn}"
    if args.process_index == 1:
        open(f"other-{path}", "x").close()
    with args.main_process_first(desc="tokenising"):
        if args.process_index == 0:
            if (attempt, turn) == (0, 1):
                raise OSError("the network failed once")
            while not os.path.exists(f"other-{path}"):
                time.sleep(0.01)
            time.sleep(0.3)  # in which the other would go on, if it did not wait
            open(path, "x").close()
        else:
            assert os.path.exists(path), "came before the main process"
"""


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_that_is_restarted_after_a_failure_of_the_main_process_begins_anew(tmp_path: Path) -> None:
    """Torchrun keeps the store, in which the others found the failure and the successes of the first attempt."""
    (tmp_path / "script.py").write_text(_RESTARTED)
    words = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "script.py",
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert sorted(path.name for path in tmp_path.glob("attempt-*")) == [
        "attempt-0-turn-0", "attempt-1-turn-0", "attempt-1-turn-1",
    ]  # fmt: skip
