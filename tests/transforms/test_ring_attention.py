"""Attention over sequences that are divided among ranks equals attention over whole ones, to 1e-12 in float64."""

from __future__ import annotations

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.transforms import divided_attention_ranks
from torch.nn.functional import scaled_dot_product_attention

from windlass.transforms.ring_attention import Sight, ring_attention
from windlass.transforms.zigzag import Zigzag


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_attend_as_one_process_does(ranks: int) -> None:
    on_ranks(ranks, divided_attention_ranks.main)


def test_a_ring_of_one_attends_the_whole_row() -> None:
    states = [torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = scaled_dot_product_attention(*states, is_causal=True)
    got = ring_attention(*states, Sight(Zigzag(1, 9)), None)
    assert (got - expected).abs().max() < 1e-12


def test_gradients_are_those_of_differences() -> None:
    states = [torch.randn(1, 2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    sight = Sight(Zigzag(1, 7), documents, window=2)
    assert torch.autograd.gradcheck(lambda *s: ring_attention(*s, sight, None), states)
