"""Hooks that bring the weights of a module to its device for the time of its forward, and inputs along with them.

Between forwards an offloaded weight is on the meta device; its data lie in a map of names to tensors (host memory, or
a reader of files), so that only the layer that runs takes memory on the device. Offloading is for inference: the copies
that a forward sees require no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.trees import find_device, send_to_device
from windlass.transforms.model_hooks import (
    Inputs,
    ModelHook,
    SequentialHook,
    without_compiler,
)
from windlass.transforms.module_tensors import (
    META,
    Place,
    SharedWeight,
    device_of,
    get_non_persistent_buffers,
    owner_of,
    put_tensor,
    set_module_tensor_to_device,
)

Weights = Mapping[str, Tensor]


class AlignDevicesHook(ModelHook):
    """Sees to it that a module, its weights and its inputs are on one device during its forward.

    Args:
        execution_device: where the module runs; None leaves inputs and weights where they are.
        offload: take the weights away after each forward, and bring them back before the next.
        io_same_device: give the output back on the device that the input came on.
        weights_map: data of offloaded weights by name, seen from the module. Without it they are kept on the host.
        offload_buffers: offload persistent buffers as well. Others always stay on the execution device.
        place_submodules: take care of all that is in the module, not of its direct tensors alone.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        tied_params_map: by name, the copies of weights that other modules share.
    """

    def __init__(
        self,
        execution_device: Place | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Weights | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: Mapping[str, SharedWeight] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map or {}
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._empty: dict[str, Tensor] = {}  # what stands in for each offloaded tensor between forwards

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the module's tensors: on the device, or away from it.

        Raises:
            ModelError: a tensor without data that the weights map does not have either.
        """
        tensors = dict(self._tensors(module))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        away = self._to_offload(module, tensors) if self.offload else set()
        for name in tensors:
            if name not in away and self.execution_device is not None:
                self._set(module, name, self.execution_device)
        for name in away:
            self._set(module, name, META)
            self._empty[name] = getattr(*owner_of(module, name))
        return module

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """All names, tied ones included: each of them must be placed."""
        yield from module.named_parameters(recurse=self.place_submodules, remove_duplicate=False)
        yield from module.named_buffers(recurse=self.place_submodules, remove_duplicate=False)

    def _to_offload(self, module: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
        staying = get_non_persistent_buffers(module, self.place_submodules, fqns=True)
        if not self.offload_buffers:
            staying |= {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
        names = set(tensors) - staying
        if self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in names}
        if missing := sorted(
            name for name in names if tensors[name].is_meta and name not in self.weights_map
        ):
            raise ModelError(
                f"no data for {', '.join(missing)} of a {type(module).__name__}: neither the module nor the offloaded "
                "weights have them; load a checkpoint that does"
            )
        return {name for name in names if name in self.weights_map}

    def _set(self, module: nn.Module, name: str, device: Place, value: Tensor | None = None) -> None:
        set_module_tensor_to_device(
            module, name, device, value=value, tied_params_map=self.tied_params_map.get(name)
        )

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Bring offloaded weights, and the inputs, to the execution device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        for name in self._empty:
            self._bring(module, name)
        if self.execution_device is None:
            return args, kwargs
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
        )

    def _bring(self, module: nn.Module, name: str) -> None:
        device = device_of(
            self.original_devices[name] if self.execution_device is None else self.execution_device
        )
        shared = self.tied_params_map[name].on(device) if name in self.tied_params_map else None
        if shared is not None:
            put_tensor(module, name, shared)
            return
        assert self.weights_map is not None
        self._set(module, name, device, self.weights_map[name])
        getattr(*owner_of(module, name)).requires_grad_(False)  # it is gone before a gradient could be used

    @without_compiler
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let go of offloaded weights; give the output back where the input came from, if that was asked for."""
        self._let_go(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Let go of offloaded weights."""
        self._let_go(module)

    def _let_go(self, module: nn.Module) -> None:
        for name, empty in self._empty.items():
            put_tensor(module, name, empty)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give the module its weights back, where they were. What had no data before stays without."""
        assert self.weights_map is not None or not self._empty
        for name in self._empty:
            if self.original_devices[name] != META and self.weights_map is not None:
                self._set(module, name, self.original_devices[name], self.weights_map[name])
        self._empty.clear()
        return module


def offload_hook(module: nn.Module) -> AlignDevicesHook | None:
    """The hook that offloads the weights of `module`, if it has one."""
    hook = getattr(module, "_hf_hook", None)
    hooks = _flat(hook) if isinstance(hook, ModelHook) else []
    return next((part for part in hooks if isinstance(part, AlignDevicesHook) and part.offload), None)


def _flat(hook: ModelHook) -> list[ModelHook]:
    if not isinstance(hook, SequentialHook):
        return [hook]
    return [part for inner in hook.hooks for part in _flat(inner)]


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the weights of `module` itself are offloaded between forwards."""
    return offload_hook(module) is not None


def load_offloaded_parameter(model: nn.Module, param_name: str) -> Tensor:
    """The data of one offloaded parameter or buffer, as the weights map holds it.

    Raises:
        ModelError: no hook of the modules around it has it.
    """
    prefix, _, name = param_name.rpartition(".")
    while True:
        hook = offload_hook(model.get_submodule(prefix))
        if hook is not None and hook.weights_map is not None and name in hook.weights_map:
            return hook.weights_map[name]
        if not prefix:
            raise ModelError(f"{param_name} is not among the offloaded weights of this model")
        prefix, _, last = prefix.rpartition(".")
        name = f"{last}.{name}"


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The whole state dict of a dispatched model, on the host; tied weights are one tensor.

    Raises:
        ModelError: a tensor is on the meta device and was not offloaded from there.
    """
    found: dict[int, Any] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) not in found:
            data = load_offloaded_parameter(model, name) if getattr(value, "is_meta", False) else value
            found[id(value)] = data.detach().to("cpu") if isinstance(data, Tensor) else data
    return {name: found[id(value)] for name, value in state.items()}
