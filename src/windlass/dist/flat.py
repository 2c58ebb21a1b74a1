"""Tensors whose elements, in row-major order, are divided among ranks at any place, not only between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor


class InParts(Tensor):
    """A tensor of which this rank need not hold all. It has a shape and a dtype, and no operations."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise TypeError(f"{func} needs a whole tensor, and each rank holds a part of this one")


class FlatParts(InParts):
    """A tensor of which each rank holds a run of elements."""

    mine: Tensor  # this rank's elements, one-dimensional; a view of the memory in which they lie
    start: int  # the index of the first of them in the flattened tensor
    # (rank, first index, number of elements) of each part with elements, in order
    pieces: tuple[tuple[int, int, int], ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], mine: Tensor, start: int, pieces: Sequence[tuple[int, int, int]]
    ) -> FlatParts:
        made: FlatParts = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=mine.dtype, device=mine.device
        )
        made.mine, made.start, made.pieces = mine, start, tuple(pieces)
        return made

    def whole(self) -> Tensor:
        """All elements, in the tensor's shape, on every rank. Collective."""
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        # `all_gather` takes parts of one length.
        own = self.mine.new_zeros(max((count for _, _, count in self.pieces), default=0))
        own[: self.mine.numel()] = self.mine
        found = [own]
        if ranks > 1:
            found = [torch.empty_like(own) for _ in range(ranks)]
            torch.distributed.all_gather(found, own)
        flat = own.new_empty(self.shape.numel())
        for rank, start, count in self.pieces:
            flat[start : start + count] = found[rank][:count]
        return flat.view(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatParts(shape={list(self.shape)}, start={self.start}, elements={self.mine.numel()})"


def divided(numel: int, length: int, ranks: int, before: int = 0) -> list[tuple[int, int, int]]:
    """The pieces of a tensor in a buffer that `ranks` divide into runs of `length` elements.

    Args:
        numel: elements of the tensor.
        before: elements of the buffer before it.
    """
    found = []
    for rank in range(ranks):
        first, end = max(rank * length, before), min((rank + 1) * length, before + numel)
        if first < end:
            found.append((rank, first - before, end - first))
    return found
