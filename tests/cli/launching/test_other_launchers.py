"""The launchers that people already use start the same scripts; their settings reach the accelerator."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tests.cli.launching.machines import free_port
from tests.dist.launch import run_script
from tests.zero.needed import needs_deepspeed

# As the command `deepspeed --num_gpus 2` passes it on, which needs a GPU itself.
TWO_HERE = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
SCRIPT = Path(__file__).parent / "any_launcher.py"
LAUNCHERS = {
    "windlass": ("windlass", "launch", "--num_processes", "2", "--mixed_precision", "bf16"),
    "accelerate": (
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
        "bf16", "--dynamo_backend", "no", "--main_process_port", "{port}",
    ),
    "deepspeed": (
        "deepspeed.launcher.launch", f"--world_info={TWO_HERE}", "--master_addr", "127.0.0.1",
        "--master_port", "{port}",
    ),
    "torch": ("torch.distributed.launch", "--nproc_per_node", "2", "--master_port", "{port}"),
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=needs_deepspeed if name == "deepspeed" else ()) for name in LAUNCHERS],
)
def test_a_script_runs_under_any_launcher(launcher: str, tmp_path: Path) -> None:
    words = [word.format(port=free_port()) for word in LAUNCHERS[launcher]]
    nowhere = {
        "WINDLASS_HOME": "/nowhere",
        "HF_HOME": "/nowhere",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    module, *flags = words
    run_script(module, *flags, SCRIPT, tmp_path, environ=nowhere)
    precision = "no" if launcher in ("torch", "deepspeed") else "bf16"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": f"2 {precision} cpu",
        "1": f"2 {precision} cpu",
    }
