"""Hooks that bring the weights and inputs of a module to its device for each forward.

Between forwards, an offloaded weight is on the meta device and its data is in a mapping of names to tensors (host
memory, or a reader of files), so only the layer that runs takes device memory. Offloading is for inference: the weights
that a forward uses require no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from windlass.compat.big_models.model_hooks import Inputs, ModelHook, without_compiler
from windlass.compat.big_models.module_tensors import (
    META,
    Place,
    SharedWeight,
    device_of,
    get_non_persistent_buffers,
    get_tensor,
    put_tensor,
    set_module_tensor_to_device,
)
from windlass.core.errors import ModelError
from windlass.core.trees import find_device, send_to_device

Weights = Mapping[str, Tensor]


@dataclass(eq=False)
class AlignDevicesHook(ModelHook):
    """Moves a module's weights and inputs to one device for its forward."""

    # The device on which the module runs; None leaves inputs and weights where they are
    execution_device: Place | None = None
    offload: bool = False  # remove the weights after each forward, and load them before the next
    io_same_device: bool = False  # move the output to the device of the input
    # Data of offloaded weights, by name relative to the module. None: a copy in host memory.
    weights_map: Weights | None = field(default=None, repr=False)
    # Offload persistent buffers too. Other buffers always stay on the execution device.
    offload_buffers: bool = False
    place_submodules: bool = False  # handle the tensors of submodules too
    skip_keys: str | list[str] | None = None  # keyword arguments, and keys of outputs, that are not moved
    # By name, the copies of weights that are shared with other modules
    tied_params_map: Mapping[str, SharedWeight] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._empty: dict[str, Tensor] = {}  # the meta tensor of each offloaded weight

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the module's tensors: on the device, or offloaded. Raises ModelError if neither the module nor the
        weights map has the data of a tensor.
        """
        tensors = dict(self._tensors(module))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        away = self._to_offload(module, tensors) if self.offload else set()
        for name in tensors:
            if name not in away and self.execution_device is not None:
                self._set(module, name, self.execution_device)
        for name in away:
            self._set(module, name, META)
            self._empty[name] = get_tensor(module, name)
        return module

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """All names, including tied ones: each of them must be placed."""
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
                f"no data for {', '.join(missing)} of a {type(module).__name__}, neither in the module nor in the "
                "offloaded weights; load a checkpoint that has them"
            )
        return {name for name in names if name in self.weights_map}

    def _shared(self, name: str) -> SharedWeight | None:
        return (self.tied_params_map or {}).get(name)

    def _set(self, module: nn.Module, name: str, device: Place, value: Tensor | None = None) -> None:
        set_module_tensor_to_device(module, name, device, value=value, tied_params_map=self._shared(name))

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Load offloaded weights, and move the inputs to the execution device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        for name in self._empty:
            self._load(module, name)
        if self.execution_device is None:
            return args, kwargs
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
        )

    def _load(self, module: nn.Module, name: str) -> None:
        place = self.original_devices[name] if self.execution_device is None else self.execution_device
        shared = self._shared(name)
        copy = None if shared is None else shared.on(device_of(place))
        if copy is not None:  # without a read from the weights map
            put_tensor(module, name, copy)
            return
        assert self.weights_map is not None
        self._set(module, name, place, self.weights_map[name])
        get_tensor(module, name).requires_grad_(False)  # it is removed before a gradient could be used

    @without_compiler
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Remove offloaded weights; with `io_same_device`, move the output to the device of the input."""
        self.forward_failed(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Remove offloaded weights."""
        for name, empty in self._empty.items():
            put_tensor(module, name, empty)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module's weights to their original devices. What had no data before has none after."""
        for name in self._empty:
            if self.weights_map is not None and self.original_devices[name] != META:
                self._set(module, name, self.original_devices[name], self.weights_map[name])
        self._empty.clear()
        return module
