"""Weights stored in a small dtype and cast to a larger one for the time of each layer's forward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from windlass.transforms.model_hooks import ModelHook, add_hook_to_module, without_compiler

CASTABLE = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip


class LayerwiseCastingHook(ModelHook):
    """Casts one layer to `compute_dtype` before its forward and back to `storage_dtype` after it."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Store the layer small."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @without_compiler
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the layer to compute."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @without_compiler
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Store the layer small again."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the linear and convolutional layers of `module` in `storage_dtype` and run them in `compute_dtype`.

    For inference: a cast loses what the smaller dtype cannot hold, and no gradient survives it.

    Args:
        skip_modules_pattern: regular expressions; modules whose names one of them is found in are left alone.
        skip_modules_classes: classes whose modules are left alone, with all that is in them.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern
    _attach(
        "",
        module,
        (storage_dtype, compute_dtype, non_blocking),
        list(patterns or []),
        skip_modules_classes or (),
    )


def _attach(
    name: str,
    module: nn.Module,
    how: tuple[torch.dtype, torch.dtype, bool],
    patterns: list[str],
    classes: tuple[type[nn.Module], ...],
) -> None:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, CASTABLE):
        add_hook_to_module(module, LayerwiseCastingHook(*how), append=True)
        return
    for child_name, child in module.named_children():
        _attach(f"{name}.{child_name}" if name else child_name, child, how, patterns, classes)
