"""The memory that a model may use on each device: all that is free, or an even share; and the sizes of its modules."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.host_memory import available_memory
from windlass.compat.big_models.module_tensors import named_module_tensors, torch_dtype
from windlass.config.kinds import convert_file_size_to_int
from windlass.core.device import visible_devices
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.logs import get_logger

Dtype = str | torch.dtype
NamedModule = tuple[str, "nn.Module | Tensor"]
PACKED = {"fp8": 1, "int4": 0.5, "int2": 0.25}  # bytes per element of formats for which torch has no dtype


def dtype_byte_size(dtype: Dtype | Any) -> float:
    """Bytes per element of a dtype of torch, or of "fp8", "int4" or "int2"."""
    name = str(getattr(dtype, "value", dtype))
    if name in PACKED:
        return PACKED[name]
    found = torch_dtype(dtype)
    assert found is not None
    return found.itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of each module, parameter and buffer, by name; `""` is the whole model. A tied weight counts once.

    Args:
        dtype: the dtype that floating-point tensors will be cast to; smaller ones are not cast.
        special_dtypes: the dtypes of single tensors, by name.
    """
    sizes: dict[str, int] = {}
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = int(tensor.numel() * _width(name, tensor, dtype, special_dtypes or {}))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            key = ".".join(parts[:depth])
            sizes[key] = sizes.get(key, 0) + size
    return sizes


def _width(name: str, tensor: Tensor, dtype: Dtype | None, special: Mapping[str, Dtype]) -> float:
    """Bytes per element of `tensor` after it is cast."""
    if name in special:
        return dtype_byte_size(special[name])
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.element_size()
    return min(dtype_byte_size(dtype), tensor.element_size())


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Bytes of all buffers of `model`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def children_of(name: str, module: nn.Module | Tensor, parameters: bool = True) -> list[NamedModule]:
    """Direct parameters (unless `parameters` is False) and direct submodules, by full name. A tensor has none."""
    if not isinstance(module, nn.Module):
        return []
    own: list[NamedModule] = [*module.named_parameters(recurse=False)] if parameters else []
    prefix = f"{name}." if name else ""
    return [(f"{prefix}{child}", value) for child, value in [*own, *module.named_children()]]


def top_level(model: nn.Module) -> list[NamedModule]:
    """Direct parameters, submodules and direct buffers of a model."""
    return [*children_of("", model), *model.named_buffers(recurse=False)]


def get_max_layer_size(
    modules: Sequence[NamedModule], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Bytes of the largest layer in `modules`, and the names of all layers of that size.

    A layer is a module without children, or one whose class is in `no_split_module_classes`.
    """
    largest = 0
    names: list[str] = []
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        children = children_of(name, module, parameters=False)
        if children and type(module).__name__ not in no_split_module_classes:
            waiting = children + waiting
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, []
        if size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the whole model, and its largest layer as in `get_max_layer_size`."""
    sizes = compute_module_sizes(model)
    no_split = list(getattr(model, "_no_split_modules", None) or [])
    return sizes.get("", 0), get_max_layer_size(top_level(model), sizes, no_split)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names that are not a prefix of another name."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in parents]


Room = dict[int | str, int]
"""Bytes by device: the index of an accelerator, `"mps"`, `"cpu"` or `"disk"`."""
Limits = Mapping[int | str, int | str]
"""As `Room`, with sizes that may be text, such as "10GB"."""

USED_OF_ONLY_DEVICE = 0.9  # leaves memory for activations if no limit was given
SLACK = 1.25  # layers do not fill a device to the last byte
_logger = get_logger(__name__)


def get_max_memory(max_memory: Limits | None = None) -> Room:
    """Bytes that may be used on each device, accelerators first. Raises ConfigError for unknown devices, all of them at
    once; or something that is not a size.

    Args:
        max_memory: sizes such as `{0: "10GB", "cpu": "30GB"}`. By default, the free memory of each accelerator and the
            available memory of the host.
    """
    if max_memory is None:
        return _free_memory()
    refuse(
        Problem("max_memory", key, "name devices by the index of an accelerator, 'mps', 'cpu' or 'disk'")
        for key in max_memory
        if not isinstance(key, int) and key not in ("mps", "cpu", "disk")
    )
    numbers = sorted(key for key in max_memory if isinstance(key, int))
    absent = [number for number in numbers if not 0 <= number < visible_devices()]
    if absent:
        _logger.warning("max_memory names devices %s, but %d are visible", absent, visible_devices())
    order = [*numbers, *(name for name in ("mps", "cpu", "disk") if name in max_memory)]
    return {key: convert_file_size_to_int(max_memory[key]) for key in order}


def _free_memory() -> Room:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == "mps":
        return {"mps": available_host_memory()}  # the host and the device share one memory
    room: Room = {}
    for index in range(visible_devices()):
        # Free bytes, and all that the device has. `torch.accelerator` answers this from torch 2.10 on only.
        room[index], _ = torch.get_device_module(accelerator).mem_get_info(index)
    return {**room, "cpu": available_host_memory()}


def available_host_memory() -> int:
    """Bytes of host memory that are available without swapping, within the limits of the container."""
    available = available_memory()
    if available is not None:
        return available
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        fix = "this system does not report its available memory: specify it, e.g. {'cpu': '16GB'}"
        raise ConfigError(Problem("max_memory", None, fix)) from None


def get_balanced_memory(
    model: nn.Module,
    max_memory: Limits | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> Room:
    """A `max_memory` for `infer_auto_device_map` with which it fills accelerators evenly.

    Each accelerator but the last is limited to an even share, plus slack for a block that does not fit exactly.

    Args:
        low_zero: put as little as possible on device 0, e.g. for `generate`.
    """
    room = get_max_memory(max_memory)
    devices = [key for key in room if key not in ("cpu", "disk") and room[key] > 0]
    if not devices:
        return room
    low_zero = low_zero and len(devices) > 1 and 0 in room
    if len(devices) == 1 and max_memory is None and isinstance(devices[0], int):
        room[devices[0]] = int(room[devices[0]] * USED_OF_ONLY_DEVICE)
        _logger.info("using up to 90 %% of device %s; set max_memory to change that", devices[0])
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    total = sizes.get("", 0)
    blocks = _largest_block(model, sizes, class_names(no_split_module_classes))
    share = total // (len(devices) - low_zero) + int(SLACK * max(blocks, _mean_layer(sizes)))
    numbers = sorted(key for key in devices if isinstance(key, int))
    for index in numbers[:-1]:  # the last one keeps its limit, in case the slack is too small
        room[index] = min(room[0] if low_zero and index == 0 else share, room[index])
    if low_zero:
        others = sum(room[index] for index in numbers if index)
        room[0] = min(max(0, total - others), room[0])
    return room


def class_names(names: Sequence[str] | str | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def _largest_block(model: nn.Module, sizes: Mapping[str, int], no_split: Sequence[str]) -> int:
    """The size of the largest block that must not be split; of each class, the first one counts."""
    first: dict[str, int] = {}
    for name, module in model.named_modules():
        if name and type(module).__name__ in no_split:
            first.setdefault(type(module).__name__, sizes.get(name, 0))
    return max(first.values(), default=0)


def _mean_layer(sizes: Mapping[str, int]) -> int:
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    layers = get_module_leaves(modules)
    return int(sum(modules[name] for name in layers) / max(len(layers), 1))
