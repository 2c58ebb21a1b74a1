"""The number of bytes of the modules of a model, which may be on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.compat.big_models.module_tensors import named_module_tensors, torch_dtype

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
