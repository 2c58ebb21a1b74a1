"""Weights that are stored in a small dtype and cast to a larger one for each layer's forward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.compat.big_models.model_hooks import Inputs, ModelHook, add_hook_to_module, without_compiler

CASTABLE = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


@dataclass(eq=False)
class LayerwiseCastingHook(ModelHook):
    """Casts one layer to `compute_dtype` before its forward, and to `storage_dtype` after it."""

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    non_blocking: bool

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @without_compiler
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.init_hook(module)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the linear and convolutional layers of `module` in `storage_dtype`, and run them in `compute_dtype`.

    For inference: a cast loses what the smaller dtype cannot represent, and layers get no gradients.

    Args:
        skip_modules_pattern: regular expressions; modules with a name in which one of them is found are skipped.
        skip_modules_classes: classes whose modules, with their submodules, are skipped.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()

    def attach(name: str, part: nn.Module) -> None:
        if isinstance(part, skip_modules_classes or ()) or any(re.search(p, name) for p in patterns):
            return
        if isinstance(part, CASTABLE):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(part, hook, append=True)
            return
        for child_name, child in part.named_children():
            attach(f"{name}.{child_name}" if name else child_name, child)

    attach("", module)
