"""Layers of experts that two ranks divide compute what one process computes, also where a rank gets no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch

RANKS = Path(__file__).with_name("expert_ranks.py")


@pytest.mark.dist
def test_an_update_of_a_loop_is_that_of_one_process() -> None:
    launch(2, RANKS)
