"""An error that ends one process among many says which one it was, and where."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch

from windlass.core.world import World
from windlass.trainer.run_training import telling_where

HERE = Path(__file__).parent


def test_alone_nothing_is_added() -> None:
    with pytest.raises(ValueError, match="mine") as caught, telling_where(World(), lambda: 3):
        raise ValueError("mine")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.dist
def test_the_failing_rank_and_the_one_that_lost_it_are_told_apart(tmp_path: Path) -> None:
    said = launch(2, HERE / "failing_ranks.py", tmp_path, expect=1)
    rest = said.partition("ValueError: a callback's own mistake")[2]
    assert "This was rank 1 of 2, at step 2." in rest
    if "This was rank 0 of 2" in said:  # it may be stopped before it notices
        assert "Another rank ended first" in said
