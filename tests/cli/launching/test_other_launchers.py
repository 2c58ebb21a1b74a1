"""The launchers that people already use start the same scripts; what they were told reaches the accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.launching.machines import free_port
from tests.dist.launch import ROOT

SCRIPT = Path(__file__).parent / "any_launcher.py"
LAUNCHERS = {
    "windlass": ("windlass", "launch", "--num_processes", "2", "--mixed_precision", "bf16"),
    "accelerate": (
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
        "bf16", "--dynamo_backend", "no", "--main_process_port", "{port}",
    ),
    "torch": ("torch.distributed.launch", "--nproc_per_node", "2", "--master_port", "{port}"),
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_runs_under_any_launcher(launcher: str, tmp_path: Path) -> None:
    words = [word.format(port=free_port()) for word in LAUNCHERS[launcher]]
    nowhere = {"WINDLASS_HOME": "/nowhere", "HF_HOME": "/nowhere", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *words, str(SCRIPT), str(tmp_path)],
        env={**os.environ, **nowhere, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    precision = "no" if launcher == "torch" else "bf16"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": f"2 {precision} cpu",
        "1": f"2 {precision} cpu",
    }
