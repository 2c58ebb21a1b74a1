"""What a pickle of tensors describes: tensors whose bytes lie beside it, dtypes, storages, and what is not read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
STORAGES: dict[tuple[str, str], torch.dtype | None] = {
    ("torch", f"{kind}Storage"): dtype
    for kind, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    }.items()
}  # fmt: skip
STORAGES["torch.storage", "UntypedStorage"] = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor, whose bytes are in the storage `key` of the file.

    Attributes:
        offset, stride: in elements; the tensor lies inside its storage.
    """

    key: str
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
