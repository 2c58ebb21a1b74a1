"""Batches between processes: their tensors as bytes, the rest as JSON. What is received is never unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import DataError

# Tensors begin at multiples of this, so that received bytes can be looked at as any dtype.
_ALIGNMENT = 16


def pack(batch: Any, notes: Any = None) -> Tensor:
    """A batch as one host tensor of bytes (uint8, 1-D): length of the description, description, tensors.

    Args:
        batch: dicts with string keys, lists, tuples, and in them tensors (dense, any device), strings, numbers, None.
        notes: what JSON can carry, to go along.

    Raises:
        DataError: something else is in the batch.
    """
    tensors: list[Tensor] = []
    description = json.dumps([notes, _describe(batch, tensors, "batch")]).encode()
    head = torch.frombuffer(
        bytearray(len(description).to_bytes(8, "little") + description), dtype=torch.uint8
    )
    return torch.cat(
        [piece for part in (head, *map(_bytes, tensors)) for piece in (part, _padding(part.numel()))]
    )


def unpack(parcel: Tensor) -> tuple[Any, Any]:
    """The batch and the notes; the tensors are views of the parcel."""
    length = int.from_bytes(parcel[:8].numpy().tobytes(), "little")
    notes, described = json.loads(parcel[8 : 8 + length].numpy().tobytes())
    return _Unpacking(parcel, 8 + length).value(described), notes


def _describe(value: Any, tensors: list[Tensor], where: str) -> Any:
    """A JSON value that names the kind of each node; tensors are appended in the order of their descriptions."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise DataError(
                f"{where} is a {value.layout} tensor; only dense tensors can be sent to other ranks."
            )
        tensors.append(value)
        return {"tensor": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if value is None or type(value) in (bool, int, float, str):
        return {"plain": value}
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {"dict": {key: _describe(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}}
    if type(value) in (list, tuple):
        return {
            type(value).__name__: [_describe(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        }
    raise DataError(
        f"{where} is a {type(value).__name__}, which cannot be sent to other ranks without pickling it. Collate into "
        "tensors, strings and numbers, or let every rank read for itself: dispatch_batches=False."
    )


class _Unpacking:
    def __init__(self, parcel: Tensor, start: int) -> None:
        self._parcel, self._at = parcel, _aligned(start)

    def value(self, described: dict[str, Any]) -> Any:
        if "tensor" in described:
            return self._tensor(getattr(torch, described["tensor"]), described["shape"])
        if "dict" in described:
            return {key: self.value(item) for key, item in described["dict"].items()}
        if "list" in described:
            return [self.value(item) for item in described["list"]]
        if "tuple" in described:
            return tuple(self.value(item) for item in described["tuple"])
        return described["plain"]

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device="meta")
        end = self._at + empty.numel() * empty.element_size()
        content = self._parcel[self._at : end].view(dtype).view(shape)
        self._at = _aligned(end)
        return content


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _padding(count: int) -> Tensor:
    return torch.zeros(_aligned(count) - count, dtype=torch.uint8)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
