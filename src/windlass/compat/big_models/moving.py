"""Move models and modules to a device temporarily: for a forward, or within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from windlass.accelerator.offloaded_weights import offload_hook
from windlass.compat.big_models.model_hooks import (
    Inputs,
    ModelHook,
    remove_hook_from_module,
    without_compiler,
)
from windlass.compat.big_models.module_tensors import (
    Place,
    device_of,
    get_tensor,
    put_tensor,
    set_module_tensor_to_device,
)
from windlass.core.device import choose_device
from windlass.core.trees import send_to_device


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward, and then on the device until `UserCpuOffloadHook.offload`.

    Args:
        execution_device: the device on which the model runs; by default this process's accelerator, if it has one.
        prev_module_hook: the hook of a model that is offloaded before this one is moved to the device.
    """

    def __init__(
        self, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = device_of(choose_device() if execution_device is None else execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the host."""
        return module.to("cpu")

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Move the model and its inputs to the device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """Returned by `cpu_offload_with_hook`: offloads a model."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the host until its next forward."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model is not moved."""
        remove_hook_from_module(self.model)


@contextmanager
def align_module_device(module: nn.Module, execution_device: Place | None = None) -> Iterator[None]:
    """Context: the direct parameters of `module` are on `execution_device`, by default where the module runs.

    Offloaded weights are loaded for the context, and changes to them are lost.
    """
    hook = offload_hook(module)
    if hook is None:
        with _moved(module, execution_device):
            yield
        return
    before = hook.execution_device
    if execution_device is not None:
        hook.execution_device = execution_device
    try:
        hook.pre_forward(module)
        yield
    finally:
        hook.post_forward(module, None)
        hook.execution_device = before


@contextmanager
def _moved(module: nn.Module, device: Place | None) -> Iterator[None]:
    """Direct parameters are on `device`; changes to them are kept."""
    if device is None:
        yield
        return
    originals = dict(module.named_parameters(recurse=False))
    try:
        for name in originals:
            set_module_tensor_to_device(module, name, device)
        yield
    finally:
        for name, original in originals.items():
            moved = get_tensor(module, name)
            if moved is not original and not moved.is_meta:
                original.data.copy_(moved.data)
            put_tensor(module, name, original)
