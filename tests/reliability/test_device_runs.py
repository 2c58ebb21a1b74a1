"""On an accelerator, a run of each kind that was killed and continued has the bits of one that was not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reliability.device_runs import ARGUMENTS

MODULE = "tests.reliability.device_runs"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_killed_run_has_the_bits_of_one_that_was_not(name: str, tmp_path: Path) -> None:
    expected = run(name, tmp_path / "whole")
    assert expected["device"].startswith("cuda")
    assert expected["losses"][-1] < expected["losses"][0]
    run(name, tmp_path / "killed", "--kill", "5")
    assert run(name, tmp_path / "killed") == expected


@pytest.mark.parametrize("name", ["fp32"])
def test_the_processor_is_asked_for(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path, "--cpu")["device"] == "cpu"


def run(name: str, folder: Path, *more: str) -> dict[str, Any]:
    """What the run told, or nothing if it was to be killed."""
    folder.mkdir(exist_ok=True)
    code, said = started(name, folder, *more)
    if "--kill" in more:
        assert code in (-signal.SIGKILL, 128 + signal.SIGKILL, 1), said[-3000:]
        assert not (folder / "told.json").exists()
        return {}
    assert code == 0, said[-3000:]
    return json.loads((folder / "told.json").read_text())


def started(name: str, folder: Path, *more: str) -> tuple[int, str]:
    """In a fresh process: one that has asked for an accelerator, as imports of some libraries do, is not forked."""
    launcher = ["-m", "windlass", "launch", "--num_processes", "1"] if name.endswith("+") else []
    command = [sys.executable, *launcher, "-m", MODULE, name, str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    return done.returncode, done.stderr
