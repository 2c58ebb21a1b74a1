"""Attention over sequences that are divided among ranks equals attention over whole ones, to 1e-12 in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dist.launch import on_ranks
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from windlass.core.world import world_from_environment
from windlass.dist.gang import join, leave
from windlass.transforms import ring_attention as ring
from windlass.transforms.ring_attention import Sight, ring_attention
from windlass.transforms.ulysses import ulysses_attention
from windlass.transforms.zigzag import Zigzag


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_attend_as_one_process_does(ranks: int) -> None:
    on_ranks(ranks, main)


def test_a_ring_of_one_attends_the_whole_row() -> None:
    states = [torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = scaled_dot_product_attention(*states, is_causal=True)
    got = ring_attention(*states, Sight(Zigzag(1, 9)), None)
    assert (got - expected).abs().max() < 1e-12


def test_sums_of_few_bits_are_made_in_single_precision() -> None:
    states = [torch.randn(1, 2, 64, 8).bfloat16() for _ in range(3)]
    sight = Sight(Zigzag(1, 64))
    expected = ring_attention(*(state.float() for state in states), sight, None)
    assert torch.equal(ring_attention(*states, sight, None), expected.bfloat16())


def test_gradients_are_those_of_differences() -> None:
    states = [torch.randn(1, 2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    sight = Sight(Zigzag(1, 7), documents, window=2)
    assert torch.autograd.gradcheck(lambda *s: ring_attention(*s, sight, None), states)


# --- what each rank runs ----------------------------------------------------------------------------------------------


CASES = 40


def _documents(rng: random.Random, rows: int, length: int) -> Tensor | None:
    """Documents of any lengths, with padding before and behind them, or nothing but padding in a row."""
    kind = rng.choice(("plain", "packed", "padded", "one row is padding"))
    if kind == "plain":
        return None
    starts = [[rng.random() < 0.2 for _ in range(length)] for _ in range(rows)]
    documents = torch.tensor(starts).cumsum(1)
    if kind == "one row is padding":
        documents[0] = -1
    if kind == "padded":
        for row in documents:
            row[rng.randint(0, length) :] = -1
            row[: rng.randint(0, length // 2)] = -1
    return documents


def _whole(states: list[Tensor], documents: Tensor | None, window: int | None, scale: float | None) -> Tensor:
    """Attention of one process by a mask of the whole row; padding, which sees nothing, gets zeros."""
    query, key, value = states
    rows, _, length, _ = query.shape
    place = torch.arange(length)
    distance = place[:, None] - place
    mask = (distance >= 0) & (distance < (window or length))
    mask = mask.expand(rows, length, length).clone()
    seen = torch.ones(rows, length, dtype=torch.bool)
    if documents is not None:
        mask &= documents[:, :, None] == documents[:, None]
        seen = documents >= 0
        mask &= seen[:, None]
        mask |= torch.eye(length, dtype=torch.bool) & ~seen[:, None]
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None], scale=scale, enable_gqa=True
    )
    return torch.where(seen[:, None, :, None], attended, 0)


def _check(seed: int) -> None:
    rank, size, rng = dist.get_rank(), dist.get_world_size(), random.Random(seed)
    rows, key_heads, length = (
        rng.randint(1, 3),
        rng.choice((1, 2, size, 2 * size)),
        2 * size * rng.randint(1, 9),
    )
    heads, width, other = key_heads * rng.randint(1, 3), rng.randint(1, 6), rng.randint(1, 6)
    documents, window = _documents(rng, rows, length), rng.choice((None, 1, 2, 3, 7, length, length + 5))
    scale, dtype = (
        rng.choice((None, 0.3, 0.0, -1.0)),
        rng.choice((torch.float64, torch.float64, torch.float32)),
    )
    ring.TILE = rng.choice((1, 2, 5, 7, 1024))  # tiles in a chunk, the last of them smaller
    generator = torch.Generator().manual_seed(seed)
    # As layers make them: a view of (rows, tokens, heads, size).
    *states, upper = (
        torch.randn(rows, length, *shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for shape in ((heads, width), (key_heads, width), (key_heads, other), (heads, other))
    )
    trained = [True, *rng.choices((True, False), k=2)]
    whole = [state.clone().requires_grad_(each) for state, each in zip(states, trained, strict=True)]
    expected = _whole(whole, documents, window, scale)
    expected.backward(upper)
    division = Zigzag(size, length)
    for attend in (ring_attention, ulysses_attention):
        takes_heads = heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)
        if attend is ulysses_attention and not takes_heads:
            continue
        row, groups = (division, ()) if attend is ring_attention else (Zigzag(1, length), (None,))
        mine = [
            division.part(each, rank, 2).requires_grad_(t) for each, t in zip(states, trained, strict=True)
        ]
        got = attend(*mine, Sight(row, documents, window), dist.group.WORLD, *groups, scale)
        got.backward(division.part(upper, rank, 2))
        pairs = [(got, expected), *((part.grad, state.grad) for part, state in zip(mine, whole, strict=True))]
        for one, other_one in pairs:
            if other_one is None:
                assert one is None
                continue
            assert one.dtype == dtype
            worst = (one - division.part(other_one, rank, 2)).abs().max().item()
            assert worst < (1e-11 if dtype is torch.float64 else 1e-4), (seed, attend.__name__, worst)


def _check_autocast() -> None:
    """It computes as without it: its sums are in float32, and none is rounded to the dtype of autocast."""
    rank, size, generator = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(0)
    division = Zigzag(size, 16 * size)
    states = [torch.randn(1, 2, 16 * size, 8, generator=generator) for _ in range(3)]

    def made() -> list[Tensor]:
        mine = [division.part(state, rank, 2).requires_grad_() for state in states]
        got = ring_attention(*mine, Sight(division), dist.group.WORLD)
        got.sum().backward()
        return [got, *(state.grad for state in mine if state.grad is not None)]

    expected = made()
    with torch.autocast("cpu", torch.bfloat16):
        found: Any = made()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def main() -> None:
    join(world_from_environment(), torch.device("cpu"))
    for seed in range(CASES):
        _check(seed)
    _check_autocast()
    leave()
