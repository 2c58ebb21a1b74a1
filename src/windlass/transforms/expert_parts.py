"""Layers of experts that compute with a part of their parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def computing_with(layer: Any, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Within the body, attributes of a layer that are its parameters are this rank's parts of them, and `num_experts`
    counts the experts in these.

    Args:
        parts: by the name of the parameter; the first size of each is the number of experts.
        dtype: of what the layer computes with them; under autocast they stay as they are.
    """
    all_experts, layer.num_experts = layer.num_experts, len(next(iter(parts.values())))
    for name, part in parts.items():
        # Of what a sharded model gathers, it casts by itself.
        own_dtype = torch.is_autocast_enabled(part.device.type)
        vars(layer)[name] = part if own_dtype else part.to(dtype)
    try:
        yield
    finally:
        layer.num_experts = all_experts
        for name in parts:
            del vars(layer)[name]
