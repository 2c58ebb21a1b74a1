"""What holds for every rank before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch


@pytest.mark.dist
def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    launch(2, Path(__file__).with_name("output_ranks.py"), tmp_path)
    said = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "output_dir=" in said[0]
    assert "can't be written" in said[0]
