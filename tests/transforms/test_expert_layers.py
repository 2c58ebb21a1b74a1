"""Layers of experts that two ranks divide compute what one process computes, also where a rank gets no token."""

from __future__ import annotations

import pytest
from tests.dist.launch import on_ranks
from tests.transforms import expert_ranks


@pytest.mark.dist
def test_an_update_of_a_loop_is_that_of_one_process() -> None:
    on_ranks(2, expert_ranks.main)
