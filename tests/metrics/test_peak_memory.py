"""Peak memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.dist.launch import run_script

from windlass.metrics.stage_memory import device_peak_bytes, memory_metrics, reset_device_peak

CPU = torch.device("cpu")


def test_the_process_peak_grows_with_what_is_touched(tmp_path: Path) -> None:
    """In a fresh process, so that the memory of earlier tests is not in the way."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch; from windlass.metrics.stage_memory import process_peak_bytes as peak\n"
        "before = peak(); held = torch.ones(64 * 2**20); print(before, peak())"
    )
    out = run_script(script)
    if "None" in out:
        pytest.skip("this system does not count a process's peak memory")
    before, after = map(int, out.split())
    assert 200 * 2**20 < after - before < 400 * 2**20  # 256 MiB were touched


def test_a_cpu_has_no_device_memory() -> None:
    reset_device_peak(CPU)
    assert device_peak_bytes(CPU) is None
    assert set(memory_metrics("train", CPU)) <= {"train_peak_memory_process_gib"}


@pytest.mark.gpu
def test_the_device_peak_counts_tensors_and_starts_anew() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    reset_device_peak(device)
    start = device_peak_bytes(device)
    assert start is not None
    torch.empty(2**20, device=device)
    assert device_peak_bytes(device) == start + 4 * 2**20
    assert "train_peak_memory_device_gib" in memory_metrics("train", device)
