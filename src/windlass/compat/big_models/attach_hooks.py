"""Attach the hooks of `offloaded.py` to a model: to every module that holds weights, or block by block."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.compat.big_models.model_hooks import Inputs, ModelHook, add_hook_to_module, without_compiler
from windlass.compat.big_models.module_tensors import Place, SharedWeight, named_module_tensors
from windlass.compat.big_models.offloaded import AlignDevicesHook, Weights

Ties = Mapping[str, SharedWeight]
Skip = str | list[str] | None


class PrefixedDataset(Mapping[str, Any]):
    """The entries of a mapping whose keys begin with a prefix, by the rest of the key."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset  # unlike the inherited one, reads no tensor

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _inside(names: Mapping[str, Any] | None, module_name: str) -> Mapping[str, Any] | None:
    return PrefixedDataset(names, f"{module_name}.") if names is not None and module_name else names


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _modules(module: nn.Module, preload: list[str] | None) -> Iterator[tuple[str, nn.Module]]:
    """`module` and its submodules, each once, but no submodules of a module of a class in `preload`."""
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        name, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield name, part
        if type(part).__name__ not in (preload or ()):
            waiting.extend((_join(name, child_name), child) for child_name, child in part.named_children())


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Place,
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Ties | None = None,
    module_name: str = "",
) -> None:
    """Move the inputs of each module that holds tensors, and has no hook yet, to `execution_device`.

    Args:
        preload_module_classes: classes whose submodules get no hook.
        module_name: the name of `module` in the model, for `tied_params_map`.
    """
    for name, part in _modules(module, preload_module_classes):
        if hasattr(part, "_hf_hook") or next(named_module_tensors(part, recurse=True), None) is None:
            continue
        ties = _inside(tied_params_map, _join(module_name, name))
        add_hook_to_module(
            part, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=ties)
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Place | None = None,
    offload: bool = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Ties | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each module in `module` that holds tensors directly.

    Args:
        module_name: the name of `module` in the model, for `weights_map` and `tied_params_map`.
        preload_module_classes: classes whose modules are loaded with their submodules, for forwards that use the
            weights of child modules without calling them.
    """
    for name, part in list(_modules(module, preload_module_classes if offload else None)):
        whole = offload and type(part).__name__ in (preload_module_classes or ())
        if not whole and next(named_module_tensors(part), None) is None:
            continue
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=_inside(weights_map, _join(module_name, name)),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=_inside(tied_params_map, _join(module_name, name)),
        )
        add_hook_to_module(part, hook, append=True)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Place | Mapping[str, Place] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Ties | None = None,
) -> None:
    """Attach hooks to the blocks of a model by two maps: where each runs, and whether its weights are offloaded.

    Args:
        execution_device: one device for all, or a map by name of a block or tensor; `""` is for the model's own code.
        offload: likewise. Blocks are not nested, except in `""` of `execution_device`.
    """
    if not isinstance(execution_device, Mapping):
        names = offload if isinstance(offload, Mapping) else {module_name: offload}
        execution_device = {name: execution_device for name in names if execution_device is not None}
    if not isinstance(offload, Mapping):
        offload = dict.fromkeys(execution_device, offload)
    align = functools.partial(
        attach_align_device_hook,
        offload=True,
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=tied_params_map,
    )
    for name, part in [(_join(module_name, name), part) for name, part in module.named_modules()]:
        is_root = part is module
        if offload.get(name, False):
            if is_root:  # before the other hooks, while the inputs are on the caller's device
                add_hook_to_module(part, AlignDevicesHook(io_same_device=True, skip_keys=skip_keys))
            align(part, execution_device.get(name), module_name=name)
        elif (placement := _placement(name, part, is_root, execution_device, offload)) is not None:
            device, away = placement
            hook = AlignDevicesHook(
                execution_device=device,
                offload=away,
                io_same_device=is_root,
                weights_map=_inside(weights_map, name),
                offload_buffers=offload_buffers,
                place_submodules=name in offload,
                skip_keys=skip_keys,
                tied_params_map=_inside(tied_params_map, name),
            )
            add_hook_to_module(part, hook)
        if name in offload and name in execution_device:
            runs_on = execution_device[name]
            attach_execution_device_hook(
                part, runs_on, skip_keys, preload_module_classes, tied_params_map, name
            )


def _placement(
    name: str, module: nn.Module, is_root: bool, devices: Mapping[str, Place], offload: Mapping[str, bool]
) -> tuple[Place | None, bool] | None:
    """The device of a module's tensors, and whether they are offloaded; None if the module needs no hook.

    Of a module that is not a block itself, only the tensors that it holds directly are placed.
    """
    if name in offload:
        return devices.get(name), False
    tensors = [_join(name, tensor) for tensor, _ in named_module_tensors(module)]
    placed = [tensor for tensor in tensors if tensor in offload]
    if not placed and not is_root:
        return None
    return devices.get(placed[0] if placed else name), any(offload[tensor] for tensor in placed)


def shared_weights(tied: list[list[str]]) -> dict[str, SharedWeight]:
    """For each tied name (see `find_tied_parameters`), the copies that its group shares."""
    return {name: shared for group in tied for shared in [SharedWeight()] for name in group}


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: list[str]
) -> dict[str, Tensor]:
    """The entries of a state dict that are in the named modules, or have one of these names."""
    return {
        key: tensor
        for key, tensor in state_dict.items()
        if any(not name or key == name or key.startswith(f"{name}.") for name in submodule_names)
    }


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
