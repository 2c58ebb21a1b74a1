"""The world of one, and how tensors are cut into messages (real ranks: tests/engine/evaluate_ranks.py)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.metrics.gather import PeerError, SoloGroup, _runs, agree, telling_others


def test_a_world_of_one_gets_its_own_back_and_lets_go() -> None:
    tensors = [torch.ones(1), torch.zeros(2)]
    first, second = tensors
    streamed = list(SoloGroup().stream(tensors))
    assert streamed == [(0, 0, first), (0, 1, second)]
    assert tensors == []


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_messages_cover_everything_within_the_limit(sizes: list[int], limit: int) -> None:
    runs = list(_runs(sizes, limit))
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert all(len(run) == 1 or sum(sizes[i] for i in run) <= limit for run in runs)


def test_an_error_stays_what_it_is() -> None:
    with pytest.raises(ArithmeticError, match="mine"), telling_others(SoloGroup()):
        raise ArithmeticError("mine")


def test_agreement_quotes_the_rank_that_failed() -> None:
    class Failed(SoloGroup):
        def gather_json(self, value):
            return [value, {"failed": "OSError: disk"}]

    with pytest.raises(PeerError, match="rank 1: OSError: disk"):
        agree(Failed(), {})
