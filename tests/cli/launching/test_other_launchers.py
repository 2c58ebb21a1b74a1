"""The launchers that people already use start the same scripts; what they were told reaches the accelerator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cli.launching.machines import free_port
from tests.dist.launch import run_to_its_end

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
    code, said = run_to_its_end(
        [sys.executable, "-m", *words, str(SCRIPT), str(tmp_path)], timeout=200, environ=nowhere
    )
    assert code == 0, said
    precision = "no" if launcher == "torch" else "bf16"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": f"2 {precision} cpu",
        "1": f"2 {precision} cpu",
    }
