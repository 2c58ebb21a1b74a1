"""An interrupt of one rank in a save, among real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.dist.launch import launch


@pytest.mark.dist
def test_a_rank_that_is_interrupted_in_a_save_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The group's own time-out is far beyond this test's: waiting for it fails."""
    launch(2, Path(__file__).with_name("gloo_interrupt.py"), tmp_path)
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(2)]
    ways = ["KeyboardInterrupt", "SystemExit", "KeyboardInterrupt"]
    assert results[0] == [["checkpoint-1", *ways, None, None, None, "checkpoint-3"], [1]]
    assert results[1] == [["checkpoint-1", None, None, None, *ways, "checkpoint-3"], [1]]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-3"]
