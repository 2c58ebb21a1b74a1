"""Page-locked host memory, from which a copy to an accelerator can overlap with computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def wants_pinning(asked: bool) -> bool:
    """Pinning is of use, and possible, only where there is an accelerator with its own memory."""
    if not asked or not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"


def pin(batch: Any) -> Any:
    """The same batch with its CPU tensors page-locked; containers are rebuilt, everything else is handed through."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return _like(batch, {name: pin(value) for name, value in batch.items()})
    if isinstance(batch, Mapping):
        return {name: pin(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        items = [pin(value) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [pin(value) for value in batch]
    return batch


def _like(batch: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Keep the type of dict subclasses: user code may read their attributes."""
    if type(batch) is dict:
        return items
    clone = batch.copy()
    clone.update(items)
    return clone
