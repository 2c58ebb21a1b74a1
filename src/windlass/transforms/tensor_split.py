"""A dimension that is divided among the ranks of a tensor gang: the vocabulary of a head, or columns of a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.core.tensors import is_fake
from windlass.transforms.linear_exchange import exchange, same

# Renamed in torch 2.13, which warns of the names before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """How a dimension is divided: each rank has a chunk, of which the last may be shorter."""

    size: int  # of the whole dimension
    # `ranks`, `rank`: how many there are, and which one this is. A single rank has all.
    ranks: int = 1
    rank: int = 0
    group: Any = None  # the process group of the ranks

    @property
    def chunk(self) -> int:
        """The length of the first part."""
        return -(-self.size // self.ranks)

    @property
    def mine(self) -> range:
        """The indices of this rank's part."""
        start = self.rank * self.chunk
        return range(start, min(start + self.chunk, self.size))

    def located(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these indices are in this rank's part, and where; 0 for the others. Raises IndexError on a CPU for
        one that no rank has, which would be computed as if it were not there; CUDA fails later, without a wait.
        """
        inside = (indices >= 0) & (indices < self.size)
        if indices.is_cuda:
            torch._assert_async(inside.all())
        elif not (torch.compiler.is_compiling() or is_fake(indices) or not indices.is_cpu or inside.all()):
            raise IndexError(f"Target {int(indices[~inside][0])} is out of bounds.")
        here = (indices >= self.mine.start) & (indices < self.mine.stop)
        return here, torch.where(here, indices - self.mine.start, 0)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def max(self, value: Tensor) -> Tensor:
        """The largest value of any rank, in place."""
        if self.ranks > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value

    def whole(self, part: Tensor) -> Tensor:
        """The parts of all ranks along the last dimension. All must compute the same with them."""
        return exchange(part, self._gathered, self._own)

    def _gathered(self, part: Tensor) -> Tensor:
        even = nn.functional.pad(part, (0, self.chunk - part.shape[-1])).contiguous()
        parts = [torch.empty_like(even) for _ in range(self.ranks)]
        dist.all_gather(parts, even, group=self.group)
        return torch.cat(parts, -1)[..., : self.size]

    def _own(self, whole: Tensor) -> Tensor:
        return whole[..., self.mine.start : self.mine.stop].contiguous()

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks, which leaves `value` as it is."""
        return self.sum(value.clone(memory_format=torch.contiguous_format))


def split_of(layer: nn.Module) -> TensorSplit | None:
    """How a divided layer is divided; None for a whole one."""
    found = getattr(layer, "split", None)
    return found if isinstance(found, TensorSplit) else None


def mine(parameter: Any) -> Tensor:
    """This rank's part of a parameter of a divided layer, with a gradient."""
    part: Tensor = parameter.to_local()
    return part


def copied(states: Tensor, split: TensorSplit) -> Tensor:
    """`states`, of which each rank computes with a part: their gradient is the sum of those of all ranks."""
    return exchange(states, same, split.total)


def summed(part: Tensor, split: TensorSplit) -> Tensor:
    """The sum over ranks, whose gradient each of them gets."""
    return exchange(part, split.total, same)


def scaled(parameter: Tensor, factor: int) -> Tensor:
    """`parameter`, whose gradient is multiplied."""
    return exchange(parameter, same, lambda gradient: gradient * factor)


# --- positions of sequences -------------------------------------------------------------------------------------------
#
# Hidden states have the shape (rows, positions, size), of which a rank has a chunk along the second axis. The last
# chunks are filled up with zeros, whose gradients are zero.


def part_of(states: Tensor, split: TensorSplit) -> Tensor:
    """This rank's positions of `states`, which all ranks have."""
    return exchange(states, partial(_own, split=split), partial(_gather, split=split))


def whole_of(part: Tensor, split: TensorSplit) -> Tensor:
    """All positions, with which all ranks compute the same."""
    return exchange(part, partial(_gather, split=split), partial(_own, split=split))


def joined(part: Tensor, split: TensorSplit) -> Tensor:
    """All positions, with which each rank computes a part: their gradient is the sum of those of all ranks."""
    return exchange(part, partial(_gather, split=split), partial(_reduce, split=split))


def reduced(states: Tensor, split: TensorSplit) -> Tensor:
    """This rank's positions of the sum over ranks."""
    return exchange(states, partial(_reduce, split=split), partial(_gather, split=split))


class Once:
    """What is made once for several layers that ask for it one after the other, and is not kept beyond the last.

    Attributes:
        layers: their number.
    """

    def __init__(self, layers: int = 0) -> None:
        self.layers, self._left = layers, 0
        self._key: Any = None
        self._made: Tensor | None = None

    def of(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """What `make` returns, or returned for the same `key` before."""
        if self._made is None or self._key is not key:
            self._key, self._made, self._left = key, make(), self.layers
        made, self._left = self._made, self._left - 1
        if not self._left:
            self._key = self._made = None
        return made


class Joined:
    """All positions, with which column-wise layers compute. For the backward they keep this rank's, which are joined
    again there, once for all of these layers.
    """

    def __init__(self, part: Tensor, split: TensorSplit) -> None:
        self.whole = joined(part, split)
        self._part, self._split, self._again = part.detach(), split, Once()

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What a linear layer returns of all positions."""
        if not weight.requires_grad:  # its backward needs no positions
            return nn.functional.linear(self.whole, weight, bias)
        self._again.layers += 1
        found: Tensor = _LinearOfJoined.apply(  # type: ignore[no-untyped-call]
            self.whole, self._part, weight, bias, self._split, self._again
        )
        return found


def _filled(states: Tensor, split: TensorSplit) -> Tensor:
    """All positions and zeros, by rank: shape (ranks, rows, chunk, size)."""
    rows, _, size = states.shape
    missing = split.chunk * split.ranks - split.size
    even = nn.functional.pad(states, (0, 0, 0, missing)) if missing else states
    return even.reshape(rows, split.ranks, split.chunk, size).transpose(0, 1)


def _own(states: Tensor, split: TensorSplit) -> Tensor:
    return _filled(states, split)[split.rank].clone()  # of one row it would be a view, which keeps all


def _gather(part: Tensor, split: TensorSplit) -> Tensor:
    rows, chunk, size = part.shape
    parts = part.new_empty(split.ranks * rows, chunk, size)
    _all_gather(parts, part.contiguous(), group=split.group)
    # Joined by a copy: pipelines detach in place what a stage ends with, which must be no view.
    by_rank = parts.view(split.ranks, rows, chunk, size).unbind(0)
    real = (p[:, : max(split.size - rank * chunk, 0)] for rank, p in enumerate(by_rank))
    return torch.cat(list(real), 1)


def _reduce(states: Tensor, split: TensorSplit) -> Tensor:
    parts = _filled(states, split).contiguous()
    own = torch.empty_like(parts[0])
    _reduce_scatter(own, parts.flatten(0, 1), group=split.group)
    return own


class _LinearOfJoined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        part: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        split: TensorSplit,
        again: Once,
    ) -> Tensor:
        ctx.split, ctx.again = split, again
        ctx.save_for_backward(part, weight)
        return nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        dtype = gradient.dtype  # that of autocast, which a backward does not know
        # Of a pass for some gradients alone, as pipelines make, the others are not computed.
        needs_input, _, needs_weight, *_ = (
            node is not None and torch._C._will_engine_execute_node(node) for node, _ in ctx.next_functions
        )
        of_weight = None
        if needs_weight:
            whole = ctx.again.of(None, lambda: _gather(part.to(dtype), ctx.split))
            of_weight = rows.T @ whole.flatten(0, -2)
        return (
            gradient @ weight.to(dtype) if needs_input else None,
            None,
            of_weight,
            rows.sum(0) if ctx.needs_input_grad[3] else None,
            None,
            None,
        )


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of each target, from the logits of this rank's classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int, split: TensorSplit) -> Tensor:
        real = targets != ignored
        here, places = split.located(torch.where(real, targets, 0))
        # Of all classes, so that every rank subtracts the same number and shares add up.
        largest = split.max(logits.amax(1))
        shares = (logits - largest[:, None]).exp_()
        chosen = torch.where(here, logits.gather(1, places[:, None])[:, 0], 0)
        total, chosen = split.sum(torch.stack([shares.sum(1), chosen]))
        ctx.save_for_backward(shares.div_(total[:, None]), places, here, real)
        return torch.where(real, largest + total.log() - chosen, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares, places, here, real = ctx.saved_tensors
        of_logits = shares.scatter_add(1, places[:, None], -here.to(shares)[:, None])
        return of_logits * torch.where(real, gradient, 0)[:, None], None, None, None


def split_cross_entropy(logits: Tensor, targets: Tensor, split: TensorSplit, ignored: int) -> Tensor:
    """The cross entropy of each target; 0 for ignored ones. Collective.

    Args:
        logits: of this rank's classes, shape (targets, classes).
        targets: int64, shape (targets,), the same on every rank.
    """
    losses: Tensor = _CrossEntropy.apply(logits, targets, ignored, split)  # type: ignore[no-untyped-call]
    return losses
