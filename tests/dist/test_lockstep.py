"""Ranks in step, and how they learn that one of them failed (by evaluations: `tests/engine/evaluate_ranks.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch

from windlass.core.errors import PeerError
from windlass.dist.gang import Gang
from windlass.dist.lockstep import Lockstep, Round, agree, telling_others


@pytest.mark.dist
def test_three_ranks_go_in_step() -> None:
    said = launch(3, Path(__file__).with_name("lockstep_ranks.py"))
    assert said.count("went in step") == 3


def test_a_world_of_one_goes_at_its_own_pace() -> None:
    rounds = Lockstep[str](Gang())
    rounds.begin("a", True, [1.0, 2.0])
    rounds.begin("b", False)
    assert rounds.end() == Round("a", 1, [1.0, 2.0])
    assert rounds.end() == Round("b", 0, [])
    assert not rounds.under_way


def test_an_error_stays_what_it_is() -> None:
    with pytest.raises(ArithmeticError, match="mine"), telling_others(Gang()):
        raise ArithmeticError("mine")


def test_agreement_quotes_the_rank_that_failed() -> None:
    class Failed(Gang):
        def gather_objects(self, value: Any) -> list[Any]:
            return [value, {"failed": "OSError: disk"}]

    with pytest.raises(PeerError, match="rank 1: OSError: disk"):
        agree(Failed(), {})
