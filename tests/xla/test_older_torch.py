"""The oldest release of torch that the package allows, which PyTorch/XLA needs: scripts started on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from windlass.core import xla

pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(not torch.__version__.startswith("2.9."), reason="needs torch 2.9: make test-xla"),
    pytest.mark.skipif(xla.is_selected(), reason="is about torch alone: USE_TORCH_XLA=0"),
]
SCRIPT = """
import torch
from tests.xla.models import losses, new_trainer

trainer = new_trainer("run", use_cpu=True, max_steps=4, save_steps=2, **{options})
trainer.train(resume_from_checkpoint={resume})
if trainer.is_world_process_zero():
    print("losses", *losses(trainer))
"""


def train(folder: Path, options: str, resume: str, *launcher: str) -> list[float]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(options=options, resume=resume))
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "USE_TORCH_XLA": "0", "PYTHONPATH": str(root)}
    command = [sys.executable, *launcher, str(script)]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    line = next(line for line in run.stdout.splitlines() if "losses " in line)
    return [float(word) for word in line.partition("losses ")[2].split()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process."""
    return train(tmp_path_factory.mktemp("one"), "{}", "None")


@pytest.mark.parametrize(
    "options", ["{'per_device_train_batch_size': 2}", "{'per_device_train_batch_size': 2, 'fsdp': True}"]
)
def test_two_processes_train_and_resume_as_one(tmp_path: Path, options: str, alone: list[float]) -> None:
    launcher = ("-m", "windlass", "launch", "--use_cpu", "--num_processes", "2")
    assert len(alone) == 4
    assert train(tmp_path, options, "None", *launcher) == pytest.approx(alone, abs=1e-5)
    resumed = train(tmp_path, options, "'run/checkpoint-2'", *launcher)
    assert resumed == pytest.approx(alone, abs=1e-5)
