"""Page-locked host memory, from which a copy to an accelerator can overlap with computation."""

from __future__ import annotations

from typing import Any

import torch

from windlass.core.device import has_accelerator
from windlass.core.trees import map_leaves


def wants_pinning(asked: bool) -> bool:
    """Return True if pinning was requested and there is an accelerator with its own memory."""
    if not asked or not has_accelerator():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"


def pin(batch: Any) -> Any:
    """The same batch with its CPU tensors page-locked; containers are rebuilt, everything else is unchanged."""
    return map_leaves(_pinned, batch, lambda part: hasattr(part, "pin_memory"))


def _pinned(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value
    return value.pin_memory()
