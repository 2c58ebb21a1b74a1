"""An interrupt of one rank in a save, among real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoint import gloo_interrupt
from tests.dist.launch import on_ranks


@pytest.mark.dist
def test_a_rank_that_is_interrupted_in_a_save_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The group's own time-out is far beyond this test's: waiting for it fails."""
    results = on_ranks(2, gloo_interrupt.main, tmp_path)
    ways = ["KeyboardInterrupt", "SystemExit", "KeyboardInterrupt"]
    assert results[0] == [["checkpoint-1", *ways, None, None, None, "checkpoint-3"], [1]]
    assert results[1] == [["checkpoint-1", None, None, None, *ways, "checkpoint-3"], [1]]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-3"]
