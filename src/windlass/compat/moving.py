"""Models and modules that a script moves to a device for a time: for a forward, or within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from windlass.core.device import choose_device
from windlass.core.trees import send_to_device
from windlass.transforms.model_hooks import Inputs, ModelHook, remove_hook_from_module, without_compiler
from windlass.transforms.module_tensors import (
    Place,
    device_of,
    owner_of,
    put_tensor,
    set_module_tensor_to_device,
)
from windlass.transforms.offload import offload_hook


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward, and then on the device until `UserCpuOffloadHook.offload`.

    Args:
        execution_device: where the model runs; by default this process's accelerator, if it has one.
        prev_module_hook: of a model that is to leave the device before this one comes.
    """

    def __init__(
        self, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = device_of(choose_device() if execution_device is None else execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Take the model to the host."""
        return module.to("cpu")

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Bring the model and its inputs to the device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """What `cpu_offload_with_hook` hands out: a model, and the means to take it off the device."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Take the model to the host, where it stays until its next forward."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)


@contextmanager
def align_module_device(module: nn.Module, execution_device: Place | None = None) -> Iterator[None]:
    """Within this context the direct parameters of `module` are on `execution_device` (or where the module runs).

    Offloaded weights are brought for the while; what is changed in them is lost.
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
    """Direct parameters on `device` for a while; what is changed in them meanwhile is kept."""
    originals = dict(module.named_parameters(recurse=False)) if device is not None else {}
    try:
        for name in originals:
            assert device is not None
            set_module_tensor_to_device(module, name, device)
        yield
    finally:
        for name, original in originals.items():
            moved = getattr(*owner_of(module, name))
            if moved is not original and not moved.is_meta:
                original.data.copy_(moved.data)
            put_tensor(module, name, original)
