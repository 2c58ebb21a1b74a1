"""Causal attention over sequences that are divided among ranks: keys and values travel round the ring of ranks.

Each rank keeps its queries, and attends one rank's keys and values after another: the softmax is carried on from part
to part (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023; the backward is that of
FlashAttention). Scores are computed in tiles, so that their memory does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.transforms.zigzag import Zigzag

TILE = 1024
"""Queries and keys in a tile of scores, at most."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys a query sees: those of its own document that are not later than itself."""

    division: Zigzag  # how rows are divided among the ranks of the ring
    # The document of each token of whole rows, shape (rows, length), int; negative for padding, which nothing sees
    # and which sees nothing. None: each row is one document without padding.
    documents: Tensor | None = None
    window: int | None = None  # the number of latest keys that a query sees, itself included; None for all

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """Which of these queries see which of these keys: bool, (rows or 1, 1, 1, queries, keys); None for all."""
        mask = None
        far = self.window is not None and queries[-1] - keys[0] >= self.window
        if far or keys[-1] > queries[0]:
            rows = torch.arange(queries.start, queries.stop, device=device)[:, None]
            distance = rows - torch.arange(keys.start, keys.stop, device=device)
            mask = distance >= 0
            if self.window is not None:
                mask &= distance < self.window
            mask = mask[None]
        if self.documents is not None:
            mine = self.documents[:, queries.start : queries.stop, None]
            same = (mine == self.documents[:, None, keys.start : keys.stop]) & (mine >= 0)
            mask = same if mask is None else mask & same
        return None if mask is None else mask[:, None, None]

    def meets(self, queries: range, keys: range) -> bool:
        """Return False if none of these queries can see any of these keys. Known without reading the documents."""
        near = self.window is None or queries[0] - keys[-1] < self.window
        return keys[0] <= queries[-1] and near


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: Any, scale: float | None = None
) -> Tensor:
    """Attend over whole rows, of which each rank of `group` has a part. Collective, in the backward too.

    Args:
        query: the part of this rank, shape (rows, heads, tokens, size). `key` and `value` may have fewer heads.
        group: the process group of the ring; None for a ring of one, whose part is the whole row.
        scale: of the scores; by default one over the root of the size.

    Returns:
        Shape (rows, heads, tokens, size of `value`). Sums are made in float32, or in the inputs' dtype if it is wider;
        padding gets zeros.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Autocast would round each product of these sums to few bits, which no kernel of attention does.
    with torch.autocast(query.device.type, enabled=False):
        attended: Tensor = _RingAttention.apply(query, key, value, sight, group, scale)  # type: ignore[no-untyped-call]
    return attended


def _grouped(states: Tensor, key: Tensor) -> Tensor:
    """(rows, heads, tokens, size) as (rows, heads of keys, queries for each, tokens, size)."""
    rows, heads, tokens, size = states.shape
    return states.reshape(rows, key.shape[1], heads // key.shape[1], tokens, size)


class _RingAttention(torch.autograd.Function):
    """Saves the part of this rank, its result and the logarithms of the sums of its softmax; keys travel again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: Any, scale: float
    ) -> Tensor:
        rank = 0 if group is None else dist.get_rank(group)
        precise = torch.promote_types(query.dtype, torch.float32)
        grouped = _grouped(query, key)
        top = torch.full((*grouped.shape[:-1], 1), -torch.inf, dtype=precise, device=query.device)
        total = torch.zeros_like(top)
        sums = total.new_zeros(*grouped.shape[:-1], value.shape[-1])
        for owner, (keys, values) in _travel([key, value], sight.division.size, rank, group):
            for rows, columns, mask in _tiles(sight, rank, owner, query.device):
                part = grouped[..., rows, :].to(precise)
                scores = _scores(part, keys[:, :, columns].to(precise), mask, scale)
                before = top[..., rows, :]
                highest = torch.maximum(before, scores.amax(-1, keepdim=True))
                finite = highest.masked_fill(highest == -torch.inf, 0)  # a query that has seen nothing yet
                weights, kept = torch.exp(scores - finite), torch.exp(before - finite)
                top[..., rows, :] = highest
                total[..., rows, :].mul_(kept).add_(weights.sum(-1, keepdim=True))
                added = _times(weights, values[:, :, columns].to(precise))
                sums[..., rows, :].mul_(kept).add_(added)
        blind = total == 0
        attended = (sums / total.masked_fill(blind, 1)).to(query.dtype)
        # Infinite for padding: its weights are zero again in the backward.
        logs = (top + total.log()).masked_fill(blind, torch.inf)
        ctx.save_for_backward(query, key, value, attended, logs)
        ctx.sight, ctx.group, ctx.scale, ctx.rank = sight, group, scale, rank
        return attended.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(gradient.device.type, enabled=False):
            return *_RingAttention._gradients(ctx, gradient), None, None, None

    @staticmethod
    def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, attended, logs = ctx.saved_tensors
        grouped = _grouped(query, key)
        upper = _grouped(gradient, key).to(logs.dtype)
        mean = (upper * attended).sum(-1, keepdim=True)
        of_query = torch.zeros_like(grouped, dtype=logs.dtype)

        def add(owner: int, keys: Tensor, values: Tensor, sums: list[Tensor]) -> None:
            for rows, columns, mask in _tiles(ctx.sight, ctx.rank, owner, query.device):
                parts = grouped[..., rows, :], keys[:, :, columns], values[:, :, columns]
                q, k, v = (states.to(logs.dtype) for states in parts)
                part = upper[..., rows, :]
                scores = _scores(q, k, mask, ctx.scale)
                weights = torch.exp(scores - logs[..., rows, :])
                slopes = weights * (_times(part, v.mT) - mean[..., rows, :]) * ctx.scale
                of_query[..., rows, :] += _times(slopes, k)
                sums[0][:, :, columns] += slopes.flatten(2, 3).mT @ q.flatten(2, 3)
                sums[1][:, :, columns] += weights.flatten(2, 3).mT @ part.flatten(2, 3)

        size = ctx.sight.division.size
        of_key, of_value = _travel_with_sums([key, value], logs.dtype, size, ctx.rank, ctx.group, add)
        return of_query.flatten(1, 2).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _tiles(
    sight: Sight, rank: int, owner: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """The tiles of the scores of the queries of `rank` with the keys of `owner` that are not wholly hidden: its
    rows, its columns, and the mask.
    """
    for places, queries in _pieces(sight.division, rank):
        for others, keys in _pieces(sight.division, owner):
            if sight.meets(places, others):
                yield queries, keys, sight.mask(places, others, device)


def _pieces(division: Zigzag, rank: int) -> Iterator[tuple[range, slice]]:
    """The part of `rank` in pieces for tiles: the places in the row, and the indices in the part."""
    offset = 0
    for stretch in division.stretches(rank):
        for at in range(0, len(stretch), TILE):
            places = stretch[at : at + TILE]
            yield places, slice(offset + at, offset + at + len(places))
        offset += len(stretch)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(rows, heads of keys, queries for each, queries, keys); minus infinity where nothing is seen."""
    scores = _times(query, key.mT) * scale
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """(rows, heads, groups, m, k) times (rows, heads, k, n), which is not copied for each group."""
    product = left.flatten(2, 3) @ right
    return product.view(*left.shape[:4], product.shape[-1])


def _travel(states: list[Tensor], size: int, rank: int, group: Any) -> Iterator[tuple[int, list[Tensor]]]:
    """Each rank's `states` with its number, this rank's own first; the next ones are under way meanwhile."""
    for step in range(size):
        hop = _Hop(states, rank, size, group) if step + 1 < size else None
        yield (rank - step) % size, states
        if hop is not None:
            states = hop.received()


def _travel_with_sums(
    states: list[Tensor], dtype: torch.dtype, size: int, rank: int, group: Any, add: Any
) -> list[Tensor]:
    """Call `add` with each rank's `states` and the sums that travel with them; return the sums over all ranks for this
    rank's own. They begin with the next rank, so that they are back after one hop less than there are ranks.
    """
    own = [torch.zeros_like(state, dtype=dtype) for state in states]
    sums: list[Tensor] = []
    hop = None
    for owner, (keys, values) in _travel(states, size, rank, group):
        if owner == rank:
            add(owner, keys, values, own)
            continue
        sums = [torch.zeros_like(total) for total in own]
        add(owner, keys, values, sums)
        if hop is not None:
            sums = [mine + others for mine, others in zip(sums, hop.received(), strict=True)]
        hop = _Hop(sums, rank, size, group)
    if hop is not None:
        own = [mine + others for mine, others in zip(own, hop.received(), strict=True)]
    return own


class _Hop:
    """Tensors on their way to the next rank, while as many come from the one before."""

    def __init__(self, tensors: list[Tensor], rank: int, size: int, group: Any) -> None:
        following, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        # In one batch: in turn, each rank would wait in its send for the next one, which waits in its own.
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, following, group) for tensor in self._sent]
            + [dist.P2POp(dist.irecv, tensor, before, group) for tensor in self._received]
        )

    def received(self) -> list[Tensor]:
        """Wait for both directions."""
        for work in self._works:
            work.wait()
        return self._received
