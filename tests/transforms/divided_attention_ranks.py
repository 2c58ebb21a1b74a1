"""Run on several ranks: attention over divided sequences equals attention over whole ones, gradients included."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from windlass.core.world import world_from_environment
from windlass.dist.gang import join, leave
from windlass.transforms import ring_attention as ring
from windlass.transforms.ring_attention import Sight, ring_attention
from windlass.transforms.ulysses import ulysses_attention
from windlass.transforms.zigzag import Zigzag

ROWS, LENGTH, SIZE = 2, 48, 6
WINDOWS = (None, 1, 5, 20)


def _documents(kind: str) -> Tensor | None:
    if kind == "plain":
        return None
    if kind == "packed":  # borders within chunks, at their seams, and one document over several chunks
        return torch.stack(
            [torch.arange(4).repeat_interleave(torch.tensor([7, 1, 16, 24])), torch.arange(LENGTH) // 12]
        )
    padded = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    padded[0, 37:] = -1  # on the right, a whole chunk of it
    padded[1, :9] = -1  # on the left
    return padded


def _whole(states: list[Tensor], documents: Tensor | None, window: int | None, scale: float) -> Tensor:
    """Attention of one process by a mask of the whole row; padding, which sees nothing, gets zeros."""
    query, key, value = states
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    mask = (distance >= 0) & (distance < (window or LENGTH))
    mask = mask.expand(ROWS, LENGTH, LENGTH).clone()
    seen = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    if documents is not None:
        mask &= documents[:, :, None] == documents[:, None]
        seen = documents >= 0
        mask &= seen[:, None]
        mask |= torch.eye(LENGTH, dtype=torch.bool) & ~seen[:, None]
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None], scale=scale, enable_gqa=True
    )
    return torch.where(seen[:, None, :, None], attended, 0)


def _compare(
    attend: Any, kind: str, window: int | None, heads: int, key_heads: int, dtype: torch.dtype
) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(heads)
    shapes = [(heads, SIZE), (key_heads, SIZE), (key_heads, SIZE - 2), (heads, SIZE - 2)]
    *states, upper = (
        torch.randn(ROWS, count, LENGTH, width, generator=generator, dtype=torch.float64)
        for count, width in shapes
    )
    scale, documents, division = 0.3, _documents(kind), Zigzag(size, LENGTH)
    whole = [state.to(dtype, copy=True).requires_grad_() for state in states]
    expected = _whole(whole, documents, window, scale)
    expected.backward(upper.to(dtype))
    mine = [division.part(state.to(dtype), rank, 2).requires_grad_() for state in states]
    whole_row = Zigzag(1, LENGTH) if attend is ulysses_attention else division
    groups = (dist.group.WORLD,) if attend is ring_attention else (dist.group.WORLD, None)
    got = attend(*mine, Sight(whole_row, documents, window), *groups, scale)
    assert got.dtype == dtype
    got.backward(division.part(upper.to(dtype), rank, 2))
    pairs = [(got, expected), *((part.grad, state.grad) for part, state in zip(mine, whole, strict=True))]
    return max((part - division.part(all_, rank, 2)).abs().max().item() for part, all_ in pairs)


def main() -> None:
    join(world_from_environment(), torch.device("cpu"))
    # As many heads of keys as of queries, half as many, and one that all ranks of Ulysses get.
    count = 6 if dist.get_world_size() == 3 else 4
    all_heads = [(count, count), (count, 3 if count == 6 else 2), (count, 1)]
    ring.TILE = 5  # several tiles in a chunk, the last of them smaller
    for attend in (ring_attention, ulysses_attention):
        cases = itertools.product(("plain", "packed", "padded"), WINDOWS)
        for (kind, window), heads in zip(cases, itertools.cycle(all_heads), strict=False):
            worst = _compare(attend, kind, window, *heads, torch.float64)
            assert worst < 1e-12, (attend.__name__, kind, window, heads, worst)
        worst = _compare(attend, "packed", 20, *all_heads[0], torch.float32)
        assert worst < 1e-5, (attend.__name__, worst)
    leave()


if __name__ == "__main__":
    main()
