"""What small measurements of a model need: evaluation mode for a moment, and short rows of its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients; every module's mode is restored."""
    # Of each module: a script may keep parts of a model in evaluation mode, as frozen norms.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def vocabulary_of(model: Any) -> int | None:
    """The tokens that the model's embedding has; None if it cannot be asked."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):
        return None


def short_row(model: nn.Module, length: int, device: torch.device) -> Tensor:
    """Different tokens that the model has, of shape (1, length)."""
    return torch.arange(length, device=device)[None] * 3 % (vocabulary_of(model) or 16)


def rounding(model: nn.Module, results: Iterable[Tensor], unit_dtype: torch.dtype | None) -> float:
    """How far results of two ways to compute may differ, as a fraction of the largest. `unit_dtype`: in which the
    model computes, if that is not the dtype of its parameters; it may return more bits than it computes with.
    """
    dtypes = {tensor.dtype for tensor in (*results, next(model.parameters()))}
    if unit_dtype is not None:
        dtypes.add(unit_dtype)
    # Sums in another order differ by some roundings in each layer; a method that is wrong differs by far more.
    return 64 * max(torch.finfo(dtype).eps for dtype in dtypes)
