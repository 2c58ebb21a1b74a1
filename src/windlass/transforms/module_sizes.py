"""How many bytes the modules of a model take. Works on the meta device, where nothing is taken yet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, Problem
from windlass.transforms.module_tensors import named_module_tensors, torch_dtype

UNITS = {
    "GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "TIB": 2**40, "GB": 10**9, "MB": 10**6, "KB": 10**3, "TB": 10**12,
}  # fmt: skip
PACKED = {
    "fp8": 1.0,
    "int4": 0.5,
    "int2": 0.25,
}  # bytes a number takes in formats that torch has no dtype for
NamedModule = tuple[str, "nn.Module | Tensor"]


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as `"1GiB"` or `"500MB"`; a number is bytes already. A lower-case `b` means bits.

    Raises:
        ConfigError: it is not a size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]I?B)\s*", str(size), re.IGNORECASE)
    if match is None or match[1].count(".") > 1:
        fix = "give bytes as a number, or a text with a unit such as '5GB' or '512MiB'"
        raise ConfigError(Problem("size", size, fix))
    unit = match[2].upper()
    count = int(float(match[1]) * UNITS[unit])
    bits = match[2].endswith("b") and "I" not in unit
    return count // 8 if bits else count


def dtype_byte_size(dtype: torch.dtype | str | Any) -> float:
    """Bytes that one number of this dtype takes; `"fp8"`, `"int4"` and `"int2"` are known besides torch's dtypes."""
    packed = PACKED.get(str(getattr(dtype, "value", dtype)))
    if packed is not None:
        return int(packed) if packed >= 1 else packed
    found = torch_dtype(dtype)
    assert found is not None
    return found.itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of each module, parameter and buffer, by name; `""` is the whole. A tied weight counts once.

    Args:
        dtype: what floating-point tensors will be cast to; those that are smaller stay as they are.
        special_dtypes: the dtype of single tensors, by name.
    """
    sizes: dict[str, int] = {}
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = _bytes_as(name, tensor, dtype, special_dtypes or {})
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            key = ".".join(parts[:depth])
            sizes[key] = sizes.get(key, 0) + size
    return sizes


def _bytes_as(
    name: str, tensor: Tensor, dtype: str | torch.dtype | None, special: Mapping[str, str | torch.dtype]
) -> int:
    if name in special:
        width = dtype_byte_size(special[name])
    elif dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        width = tensor.element_size()  # whole numbers are never cast
    else:
        width = min(dtype_byte_size(dtype), tensor.element_size())
    return int(tensor.numel() * width)


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> int:
    """Bytes of all buffers of `model`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def children_of(name: str, module: nn.Module | Tensor, parameters: bool = True) -> list[NamedModule]:
    """Direct parameters (if asked for) and direct submodules, under their full names. A tensor has none."""
    if not isinstance(module, nn.Module):
        return []
    own: list[NamedModule] = [*module.named_parameters(recurse=False)] if parameters else []
    prefix = f"{name}." if name else ""
    return [(f"{prefix}{child}", value) for child, value in [*own, *module.named_children()]]


def top_level(model: nn.Module) -> list[NamedModule]:
    """What a model is made of: direct parameters, submodules, direct buffers."""
    return [*children_of("", model), *model.named_buffers(recurse=False)]


def get_max_layer_size(
    modules: Sequence[NamedModule], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Bytes of the largest layer in `modules`, and the names of all layers of that size.

    A layer is a module without children, or one whose class is in `no_split_module_classes`.
    """
    largest, names = 0, []
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        children = children_of(name, module, parameters=False)
        if children and type(module).__name__ not in no_split_module_classes:
            waiting = children + waiting
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the whole model, and its largest layer as `get_max_layer_size` gives it."""
    sizes = compute_module_sizes(model)
    no_split = list(getattr(model, "_no_split_modules", None) or [])
    return sizes.get("", 0), get_max_layer_size(top_level(model), sizes, no_split)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names that no other name lies under."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in parents]
