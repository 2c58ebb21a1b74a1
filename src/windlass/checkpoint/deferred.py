"""Stored tensors, of which a part is read once it is needed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.errors import CheckpointError
from windlass.dist.flat import FlatParts
from windlass.dist.sharded import Part, part


@dataclass(frozen=True, slots=True)
class Shaped:
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def empty_host(sizes: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
    """A tensor in host memory. A file may claim a size that cannot be allocated: `what` names it in the error."""
    try:
        return torch.empty(sizes, dtype=dtype)
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{what} cannot be allocated: {error}") from None


class TensorSource(ABC):
    """Stored tensors by name.

    Args:
        tensors: dtype and shape of each.
    """

    def __init__(self, tensors: Mapping[str, Shaped]) -> None:
        self._shaped = tensors

    @property
    def names(self) -> list[str]:
        return list(self._shaped)

    def __contains__(self, name: object) -> bool:
        return name in self._shaped

    def shaped(self, name: str) -> Shaped:
        return self._shaped[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shaped[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._shaped[name].dtype

    @abstractmethod
    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        """A tensor, or this part of it, on the host."""


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


def read_held(source: TensorSource, name: str, like: Tensor) -> Tensor:
    """What this rank holds of a stored tensor, if it holds of it what it holds of `like`."""
    if isinstance(like, FlatParts):
        return read_run(source, name, like.start, like.mine.numel())
    return source.read(name, part(like))


def read_run(source: TensorSource, name: str, start: int, length: int) -> Tensor:
    """A run of the elements of a stored tensor in row-major order, one-dimensional, on the host. Reads the rows that
    hold it. `start`: index of the first element in the flattened tensor.
    """
    shape = source.shape(name)
    if not shape or not length:
        return source.read(name).reshape(-1)[start : start + length] if length else torch.empty(0)
    inner = math.prod(shape[1:])
    first, end = start // inner, -(-(start + length) // inner)
    rows = Part((first, *(0,) * (len(shape) - 1)), (end - first, *shape[1:]))
    flat = source.read(name, rows).reshape(-1)
    return flat[start - first * inner :][:length]
