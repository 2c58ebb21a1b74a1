"""Loops on two ranks, replicated and sharded, against the same loops in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from tests.accelerator import loop_cases
from tests.dist.launch import launch

HERE = Path(__file__).parent


@pytest.mark.dist
def test_two_ranks_end_as_one_process_does(tmp_path: Path) -> None:
    for name, case in loop_cases.CASES.items():
        save_file(case(False), tmp_path / f"{name}.safetensors")
    said = launch(2, HERE / "loop_ranks.py", tmp_path, timeout=500)
    assert said.count("LOOPS AGREE") == 2
