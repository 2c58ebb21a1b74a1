"""Stored tensors that are read when they are needed, and then only the part that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from windlass.dist.sharded import Part


class TensorSource(Protocol):
    """Stored tensors by name."""

    @property
    def names(self) -> list[str]: ...

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        """A tensor, or this part of it, on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Deferred:
    """A stored tensor that is yet to be read, in a state whose other values are read already."""

    name: str
    source: TensorSource

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.source.shape(self.name))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype(self.name)

    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, wanted: Part | None = None) -> Tensor:
        return self.source.read(self.name, wanted)
