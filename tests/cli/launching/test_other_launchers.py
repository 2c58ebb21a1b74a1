"""The launchers that people already use start the same scripts; their settings reach the accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.launching.machines import free_port
from tests.dist.launch import run_script

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
    module, *flags = words
    run_script(module, *flags, SCRIPT, tmp_path, environ=nowhere)
    precision = "no" if launcher == "torch" else "bf16"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": f"2 {precision} cpu",
        "1": f"2 {precision} cpu",
    }
