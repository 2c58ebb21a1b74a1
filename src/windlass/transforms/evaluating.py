"""What small measurements of a model need: evaluation mode for a moment, and short rows of its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients; every module's mode is restored."""
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
