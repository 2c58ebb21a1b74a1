"""Causal attention over sequences that are divided among ranks: heads travel instead of keys.

Each rank exchanges its tokens of all heads for all tokens of its heads, attends them as one process would, and
exchanges back (Jacobs et al., "DeepSpeed Ulysses", 2023). If the ranks have a part of the rows between them, the keys
of the other parts travel to them in rings, one for each rank (Fang and Zhao, "USP", arXiv:2405.07719).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.errors import ConfigError, Problem
from windlass.transforms.linear_exchange import exchange
from windlass.transforms.ring_attention import Sight, ring_attention
from windlass.transforms.zigzag import Zigzag


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    group: Any,
    ring: Any,
    scale: float | None,
) -> Tensor:
    """Attend over whole rows: arguments and result as `ring_attention`.

    If there are fewer heads of keys than ranks, each is sent to several ranks. Raises ConfigError if the heads cannot
    be divided among the ranks.

    Args:
        sight: its division is that of the ring; `group` divides each of its parts like a row.
        group: the ranks that exchange heads.
        ring: the ranks that have the same heads of the other parts; None if there is one part, the whole row.
    """
    size = dist.get_world_size(group)
    refuse_heads(query.shape[1], key.shape[1], size)
    if key.shape[1] % size:
        # Each rank needs a head of keys: neighbouring ranks, whose queries use the same one, get a copy each.
        copies = size // key.shape[1]
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    division = Zigzag(size, sight.division.length // sight.division.size)
    queries, keys, values = (
        division.whole(_exchange(states, group, 1, 2), 2) for states in (query, key, value)
    )
    attended = ring_attention(queries, keys, values, sight, ring, scale)
    return _exchange(division.parts(attended, 2), group, 2, 1)


def refuse_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise ConfigError if heads, or those of keys, cannot be divided among `size` ranks."""
    if heads % size:
        raise ConfigError(Problem("sp_size", size, f"must divide the number of attention heads, {heads}"))
    if key_heads % size and size % key_heads:
        fix = f"must divide the number of key-value heads, {key_heads}, or be a multiple of it"
        raise ConfigError(Problem("sp_size", size, fix))


def _exchange(states: Tensor, group: Any, split: int, join: int) -> Tensor:
    """Cut along `split`, send each rank its piece, and join what is received along `join`."""
    return exchange(
        states,
        partial(_exchanged, group=group, split=split, join=join),
        partial(_exchanged, group=group, split=join, join=split),
    )


def _exchanged(states: Tensor, group: Any, split: int, join: int) -> Tensor:
    size = dist.get_world_size(group)
    # One message to each rank: `all_to_all_single` divides the first axis.
    sent = torch.stack(states.chunk(size, split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)
