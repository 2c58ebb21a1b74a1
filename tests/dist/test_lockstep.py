"""Ranks in step, and how they learn that one of them failed (by evaluations: `tests/engine/evaluate_ranks.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks

from windlass.core.errors import PeerError
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.dist.lockstep import (
    Lockstep,
    Round,
    answer_until_all_are_done,
    exchange_messages,
    telling_others,
)


@pytest.mark.dist
def test_three_ranks_go_in_step() -> None:
    on_ranks(3, main)


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
        exchange_messages(Failed(), {})


# --- what each rank runs ----------------------------------------------------------------------------------------------


def rounds_begun_ahead(gang: Gang) -> None:
    items = iter(range(2 * gang.rank))
    rounds = Lockstep[int | None](gang)

    def begin() -> None:
        item = next(items, None)
        rounds.begin(item, item is not None, [float(gang.rank), 1.0])

    for _ in range(2):
        begin()
    seen = []
    while (told := rounds.end()).going_on:
        begin()
        seen.append((told.item, told.going_on))
        assert told.sums == [sum(range(gang.size)), gang.size]
    longest = 2 * (gang.size - 1)
    mine = [*range(2 * gang.rank), *[None] * (longest - 2 * gang.rank)]
    assert seen == [(item, sum(2 * rank > n for rank in range(gang.size))) for n, item in enumerate(mine)]
    assert rounds.under_way  # what was begun may be dropped


def a_rank_that_left_answers(gang: Gang) -> None:
    if gang.rank == 0:
        answer_until_all_are_done(gang, 1)
        return
    rounds, going_on = Lockstep[int](gang), []
    for number in range(gang.size):
        rounds.begin(number, number < gang.rank, [1.0])
        told = rounds.end()
        going_on.append(told.going_on)
        assert told.sums == [gang.size - 1], "the rank that left sends zeros"
    assert going_on == [2, 1, 0]


def main() -> None:
    gang = join(world_from_environment(), torch.device("cpu"))
    for check in (rounds_begun_ahead, a_rank_that_left_answers):
        check(gang)
    gang.barrier()
    leave()
