"""How scripts on PyTorch/XLA are started: once for all devices, and not once for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.xla.models import needs_xla

pytestmark = [pytest.mark.xla, needs_xla]
LAUNCH = """
import torch_xla
from windlass import Accelerator

def train(index):
    Accelerator()

if __name__ == "__main__":
    torch_xla.launch(train)
"""
STATE = "from windlass import Accelerator; print(Accelerator().distributed_type, Accelerator().num_processes)"


def run(folder: Path, script: str, *launcher: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    # Several devices of this process are driven by SPMD, which sets a variable; a script of its own has not begun yet.
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_USE_SPMD"}
    environment = {**inherited, "PJRT_DEVICE": "CPU", **variables}
    command = [sys.executable, *launcher, str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def test_workers_for_each_device_are_refused(tmp_path: Path) -> None:
    found = run(tmp_path, LAUNCH, CPU_NUM_DEVICES="2")
    assert found.returncode != 0
    assert "torch_xla.launch='worker 0': one process drives all devices" in found.stderr


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = run(tmp_path, STATE, PJRT_DEVICE="TPU")
    assert found.returncode != 0
    assert "PJRT_DEVICE='TPU': PyTorch/XLA finds no such device" in found.stderr


@pytest.mark.parametrize("asked", ["flag", "file"])
def test_the_launcher_starts_one_process_for_it(tmp_path: Path, asked: str) -> None:
    file = tmp_path / "default.yaml"
    file.write_text("distributed_type: XLA\n")
    options = ["--tpu"] if asked == "flag" else ["--config_file", str(file)]
    found = run(tmp_path, STATE, "-m", "windlass", "launch", *options)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "XLA 1" in found.stdout
