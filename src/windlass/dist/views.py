"""Tensors that are views of the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from windlass.core.tensors import address, is_fake
from windlass.dist.sharded import is_in_parts


def overlapping(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of plain tensors of one dtype that reach into each other's memory, together."""
    places = [
        (str(t.device), _storage(t), str(t.dtype), t.storage_offset(), end_of(t), name)
        for name, t in tensors.items()
        if not (is_in_parts(t) or _is_made_of_others(t) or t.is_meta)
        and t.layout == torch.strided
        and t.numel()
    ]
    group, memory, until = list[str](), None, 0
    for device, storage, dtype, begin, end, name in sorted(places):
        if memory == (device, storage, dtype) and begin < until:
            group.append(name)
            until = max(until, end)
            continue
        if len(group) > 1:
            yield group
        group, memory, until = [name], (device, storage, dtype), end
    if len(group) > 1:
        yield group


def _is_made_of_others(tensor: Tensor) -> bool:
    """True for a tensor without memory of its own, such as a quantized one of torchao."""
    return hasattr(tensor, "__tensor_flatten__")


def _storage(tensor: Tensor) -> int:
    """The address of its memory. Views on XLA devices have memory of their own, and fake tensors have none."""
    if tensor.device.type == "xla":
        return address(tensor)
    storage = tensor.untyped_storage()
    return storage._cdata if is_fake(tensor) else storage.data_ptr()


def end_of(view: Tensor) -> int:
    """Index behind the last element of `view` in its storage."""
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return int(view.storage_offset() + reach + 1)
