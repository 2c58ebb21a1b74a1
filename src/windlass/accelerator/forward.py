"""Changes that preparing makes to a model's forward: mixed precision, and a check that the wrapper is called."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn

from windlass.core.errors import ModelError
from windlass.core.trees import convert_to_fp32
from windlass.transforms.ddp import Replicated

_ORIGINAL = "_original_forward"


def mix_precision(module: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run the module's forward under `autocast`, and convert its floating-point outputs to single precision.

    The forward is replaced on the instance, so its class, parameter names and hooks do not change.
    """
    if hasattr(module, _ORIGINAL):
        return
    original = module.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast():
            result = type(self).forward(self, *args, **kwargs) if own else original(*args, **kwargs)
        return convert_to_fp32(result)

    # Of a method the copy of a module must call its own; a function put on the object belongs to that object alone.
    own = getattr(original, "__func__", None) is type(module).forward
    setattr(module, _ORIGINAL, original)
    module.forward = MethodType(forward, module)


def restore_forward(module: nn.Module) -> None:
    """Undo `mix_precision`."""
    if hasattr(module, _ORIGINAL):
        module.forward = getattr(module, _ORIGINAL)
        delattr(module, _ORIGINAL)
        if getattr(module.forward, "__func__", None) is type(module).forward:
            del module.forward  # the class's own again


def refuse_raw_forward(module: nn.Module, wrapper: Replicated) -> Callable[[], None]:
    """Refuse forwards of `module` in training that do not come through `wrapper`: their gradients would not be reduced.

    Evaluation, and whatever runs without gradients, may use the bare module.

    Returns:
        A function that removes the check.
    """
    seen, guarded = wrapper.forwards, weakref.ref(module)

    def check(bare: nn.Module, args: Any) -> None:
        nonlocal seen
        if bare is not guarded():  # a copy of the module, which has its own way
            return
        if wrapper.forwards == seen and bare.training and torch.is_grad_enabled():
            name = type(bare).__name__
            raise ModelError(
                f"the {name} that was given to `accelerator.prepare` was called directly: its gradients would not be "
                "reduced over the processes. Call the model that `prepare` returned"
            )
        seen = wrapper.forwards

    return module.register_forward_pre_hook(check).remove
