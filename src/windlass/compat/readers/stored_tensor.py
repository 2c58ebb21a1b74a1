"""Tensors whose bytes are in a file of `torch.save`, and what of its content is not read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes in a file: where they begin, their number, their CRC-32."""

    begin: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor.

    Attributes:
        offset, stride: in elements; the tensor lies inside its storage.
    """

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Its elements are adjacent in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Unread:
    """In place of an object, or of a class or function: its name in the file. Nothing of that name is looked up."""

    name: str
