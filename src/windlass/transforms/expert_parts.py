"""Layers of experts that compute with a part of their parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def computing_with(layer: nn.Module, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Within the body, attributes of a layer that are its parameters are this rank's parts of them.

    Args:
        parts: by the name of the parameter.
        dtype: of what the layer computes with them; under autocast they stay as they are.
    """
    for name, part in parts.items():
        # Of what a sharded model gathers, it casts by itself.
        own_dtype = torch.is_autocast_enabled(part.device.type)
        vars(layer)[name] = part if own_dtype else part.to(dtype)
    try:
        yield
    finally:
        for name in parts:
            del vars(layer)[name]
