"""Tensors in files between steps: training as in memory, and checkpoints that hold them."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import launch, run_script
from tests.zero import swapped_runs
from tests.zero.needed import needs_deepspeed
from tests.zero.test_zero_checkpoints import digest

from windlass.core.errors import ConfigError
from windlass.core.optional import is_available
from windlass.zero.swap_files import lock_files

SCRIPT = Path(swapped_runs.__file__)
TOLERANCE = 5e-6


def compiles() -> bool:
    """Return True if DeepSpeed can compile its access to files here."""
    if not is_available("deepspeed"):
        return False
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not compiles():
        pytest.skip("needs libaio with its headers: apt-get install libaio-dev")
    made = tmp_path_factory.mktemp("swapped")
    run_script(SCRIPT, made, "alone:alone:6")
    return made


def found_in(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
def test_a_run_equals_one_in_memory_and_resumes_to_the_same_bits(folder: Path) -> None:
    launch(2, SCRIPT, folder, "clean:optimizer:6", "memory:memory:6", "same:optimizer:3", timeout=900)
    launch(2, SCRIPT, folder, "same:optimizer:6:resume", timeout=900)
    found, memory, alone = (found_in(folder, name) for name in ("clean", "memory", "alone"))
    assert any("exp_avg" in name for name in found.pop("files")), "the state was in files"
    assert not memory.pop("files")
    assert found == memory
    assert found["loss"] == pytest.approx(alone["loss"], abs=TOLERANCE)
    saved, expected = (load_file(folder / name / "model.safetensors") for name in ("clean", "alone"))
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=TOLERANCE)
    clean, in_memory, same = (digest(folder / name / "checkpoint-6") for name in ("clean", "memory", "same"))
    assert "optimizer-rank-00001.safetensors" in clean
    assert clean == in_memory == same


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
def test_a_checkpoint_of_files_is_continued_in_one_process_and_back(folder: Path) -> None:
    launch(2, SCRIPT, folder, "first:optimizer:3", timeout=900)
    shutil.copytree(folder / "first", folder / "on")
    run_script(SCRIPT, folder, "on:alone:6:resume")
    run_script(SCRIPT, folder, "back:alone:3")
    launch(2, SCRIPT, folder, "back:optimizer:6:resume", timeout=900)
    expected = load_file(folder / "alone" / "model.safetensors")
    for run in ("on", "back"):
        for name, value in load_file(folder / run / "model.safetensors").items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": section}}
    with lock_files(config, 0), pytest.raises(ConfigError, match="give each one of its own"):
        lock_files(config, 0)
    with lock_files(config, 0) as lock:
        fcntl.flock(lock, fcntl.LOCK_UN)
