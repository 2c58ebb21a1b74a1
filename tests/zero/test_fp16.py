"""fp16 under ZeRO: DeepSpeed's loss scale, updates that overflow, and the state of both."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch, run_script, run_to_its_end
from tests.zero import fp16_runs
from tests.zero.needed import needs_deepspeed

from windlass.core.optional import is_available

SCRIPT = Path(fp16_runs.__file__)

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


def parts(folder: Path) -> str:
    files = sorted(file for file in folder.iterdir() if file.suffix == ".safetensors")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.parametrize("stage", [1, 3])
def test_updates_that_overflow_are_skipped_and_a_resumed_run_has_the_same_bits(
    stage: int, tmp_path: Path
) -> None:
    launch(
        2, SCRIPT, tmp_path, f"run:{stage}:24", f"stopped:{stage}:12", f"stopped:{stage}:24:resume", "anyway"
    )
    run_script(SCRIPT, tmp_path, "alone:-1:24")
    found, alone = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("run", "alone"))
    skipped = [norm for norm in found["grad_norm"] if norm is None or not math.isfinite(norm)]
    assert 0 < len(skipped) < 24, "a scale of 2**30 overflows until it is low enough"
    assert found["loss"][0] == pytest.approx(alone["loss"][0], abs=5e-3)
    assert found["loss"][-1] < found["loss"][0] - 0.1
    folders = [tmp_path / name / "checkpoint-24" for name in ("run", "stopped")]
    assert parts(folders[0]) == parts(folders[1])


def _computes_in_fp16() -> bool:
    if not is_available("deepspeed"):
        return True
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


@pytest.mark.skipif("_computes_in_fp16()", reason="needs a device without fp16 in DeepSpeed")
def test_a_device_without_fp16_is_named(tmp_path: Path) -> None:
    said = run_script(SCRIPT, tmp_path, "run:1:4", expect=1)
    assert "does not compute in fp16 on this device (cpu)" in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_fp16_on_its_own_device(tmp_path: Path) -> None:
    # In a fresh process: those that are forked train on the processor.
    code, said = run_to_its_end([sys.executable, str(SCRIPT), str(tmp_path), "run:2:24"], timeout=200)
    assert code == 0, said
    losses = json.loads((tmp_path / "run.json").read_text())["loss"]
    assert losses[-1] < losses[0] - 0.1
