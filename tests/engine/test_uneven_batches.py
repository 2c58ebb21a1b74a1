"""Evaluation batches of which ranks have different numbers: three real ranks, and a world of one here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch

from windlass.dist.gang import Gang
from windlass.engine.uneven_batches import interruptible_batches, pad_uneven_batches


@pytest.mark.dist
def test_three_ranks_go_in_step() -> None:
    said = launch(3, Path(__file__).with_name("uneven_batches_ranks.py"))
    assert said.count("went in step") == 3


def test_a_world_of_one_gets_its_own_batches() -> None:
    placed = [([0], "a"), ([1], "b")]
    assert list(pad_uneven_batches(placed, Gang())) == placed
    heard: list[float] = []
    assert list(interruptible_batches("ab", Gang(), lambda: (2.0,), heard.extend)) == ["a", "b"]
    assert heard == [2.0] * 3
