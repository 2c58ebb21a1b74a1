"""Functions whose gradients are given beside them, such as exchanges between ranks with their transposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def exchange(tensor: Tensor, there: Map, back: Map) -> Tensor:
    """`there` of a tensor, whose gradient is `back` of that of the result. Neither may write into what it gets."""
    found: Tensor = _Exchange.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return found


def same(tensor: Tensor) -> Tensor:
    """The tensor as another one, which the forward of an autograd function must return."""
    return tensor.view_as(tensor)
