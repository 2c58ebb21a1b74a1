"""Machines without a shared folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch
from tests.trainer.resume_cases import Case, run

HERE = Path(__file__).parent


@pytest.mark.dist
def test_two_disks(tmp_path: Path) -> None:
    launch(2, HERE / "nodes_ranks.py", tmp_path)
    # Put together, they are a checkpoint like any other: one process reads it too.
    changed = {"gradient_accumulation_steps": 1, "num_train_epochs": 1, "save_strategy": "no"}
    for name in ("joined", "joined_sharded"):
        trainer = run(tmp_path / name, Case(changed), resume=True)
        assert trainer.state.global_step == 9
