"""Measures, in the first real call of a loss function, what it does with `num_items_in_batch`.

The function gets a count that can be differentiated: a loss S / N has the derivative -S / N^2 by N, so -N dL/dN is L
for a loss that is divided by the count, 0 for one that is not, and something between for a mixture. A count that is
read as a number (`.item()`, `float()`) leaves no derivative, so reads are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from windlass.core.types import LossTerms

_TOLERANCE = 1e-2
_READS = frozenset(
    {"item", "tolist", "numpy", "__int__", "__float__", "__index__", "__format__", "__array__"}
)


class Use(Enum):
    """How a loss uses the count."""

    DIVIDES = "it is divided by the count"
    IGNORES = "it does not depend on the count"
    MIXES = "some of its terms are divided by the count, and others are not"
    UNKNOWN = "the count was read as a number"


class CountWatch:
    """Makes the counts of the first calls, and judges the losses of these calls.

    Args:
        sum_over_ranks: sums a host tensor over ranks. All ranks judge at the same calls.
    """

    def __init__(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        self._sum_over_ranks = sum_over_ranks
        self._leaf: Tensor | None = None
        self._value = 0.0

    def count(self, value: float, plain: Tensor) -> Tensor:
        """`plain`, a count of this value, as a watched tensor, which computes the same bits."""
        wide = torch.float32 if plain.device.type == "mps" else torch.float64
        self._leaf = torch.full((), value, dtype=wide, device=plain.device, requires_grad=True)
        self._value = value
        WatchedCount.was_read = False
        return WatchedCount.of(plain, self._leaf)

    def judge(self, loss: Tensor | LossTerms) -> tuple[Use, float] | None:
        """How the loss uses the count, and its value times the count over all ranks. Collective.

        None if it cannot be measured because the loss is 0 or not finite on every rank.
        """
        total = loss.sum if isinstance(loss, LossTerms) else loss
        found = None
        if self._leaf is not None and total.requires_grad:
            (found,) = torch.autograd.grad(total, self._leaf, retain_graph=True, allow_unused=True)
        value, slope = float(total.detach()), 0.0 if found is None else -float(found) * self._value
        usable = math.isfinite(value) and math.isfinite(slope)
        mine = (
            [abs(value), slope * math.copysign(1.0, value), abs(value) * self._value] if usable else [0.0] * 3
        )
        seen = torch.tensor([*mine, float(WatchedCount.was_read)], dtype=torch.float64)
        size, share, scaled, reads = self._sum_over_ranks(seen).tolist()
        if size == 0.0:
            return None
        return _use(share / size, bool(reads)), scaled


def _use(share: float, was_read: bool) -> Use:
    if math.isclose(share, 1.0, abs_tol=_TOLERANCE):
        return Use.DIVIDES
    if abs(share) > _TOLERANCE:
        return Use.MIXES
    return Use.UNKNOWN if was_read else Use.IGNORES


class WatchedCount(Tensor):
    """A count whose floating-point uses go through a tensor that requires a gradient."""

    was_read: ClassVar[bool] = False
    _leaf: Tensor

    @classmethod
    def of(cls, plain: Tensor, leaf: Tensor) -> Tensor:
        watched: WatchedCount = plain.detach().as_subclass(cls)
        watched._leaf = leaf
        return watched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if getattr(func, "__name__", "") in _READS:
            WatchedCount.was_read = True
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
            others = [t for t in tensors if not isinstance(t, WatchedCount)]
            dtypes = [t.dtype for t in others if t.is_floating_point()]
            if dtypes:  # like a whole number, in the type of the other operand
                return _called(func, given, lambda count: count._leaf.to(dtypes[0]))
            result = _called(func, given, lambda count: count.as_subclass(Tensor))
            if not isinstance(result, Tensor) or result.dtype is torch.bool:
                return result
            shadow = _called(func, given, lambda count: count._leaf)
            if result.is_floating_point():
                return shadow.to(result.dtype)
            first = next(t for t in tensors if isinstance(t, WatchedCount))
            return WatchedCount.of(result, shadow if shadow.is_floating_point() else first._leaf)


def _called(func: Any, given: Any, change: Callable[[WatchedCount], Tensor]) -> Any:
    args, kwargs = tree_map(lambda leaf: change(leaf) if isinstance(leaf, WatchedCount) else leaf, given)
    return func(*args, **kwargs)
