"""Models that are divided already when they are placed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch


@pytest.mark.dist
def test_a_model_that_was_divided_before_is_refused_with_the_way_out(tmp_path: Path) -> None:
    said = launch(2, Path(__file__).with_name("divided_ranks.py"), tmp_path)
    assert said.count("refused with the way out") == 2
