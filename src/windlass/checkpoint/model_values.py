"""What a model's state dict holds besides plain tensors, as tensors of the same file.

A value that is not a tensor (`get_extra_state` may return any), or is one that safetensors has no dtype for, is stored
as the tree that `codec` makes of it:

    NAME#json            the tree, as the bytes of strict JSON (uint8)
    NAME#tensors/PATH    each tensor in it

so that every layout of weights (one file, several files, parts of ranks) holds values too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.codec import decode, encode
from windlass.checkpoint.deferred import TensorSource
from windlass.checkpoint.tensor_file import CODES
from windlass.core.errors import CheckpointError
from windlass.core.module_state import EXTRA_STATE
from windlass.core.tensors import same_bits
from windlass.dist.sharded import Part, is_sharded

_TREE, _TENSORS = "#json", "#tensors/"


def as_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict in which every entry is a tensor. Applied to its own result it changes nothing."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        entries = {name: value} if is_plain(value) else _encoded(name, value)
        taken = entries.keys() & found.keys()
        if taken:
            raise CheckpointError(f"model state {min(taken)!r} exists twice; rename it in the model")
        found |= entries
    return found


def is_plain(value: Any) -> bool:
    """Return True if an entry of a state dict is stored as one tensor of its name."""
    if not isinstance(value, Tensor):
        return False
    return not value.is_complex() or value.dtype in CODES or is_sharded(value)


def _encoded(name: str, value: Any) -> dict[str, Tensor]:
    try:
        tree, tensors = encode(value)
    except CheckpointError as error:
        raise CheckpointError(f"model state {name!r} is a {type(value).__name__}: {error}") from None
    text = bytearray(strict_json.dump(tree, name))
    entries = {f"{name}{_TREE}": torch.frombuffer(text, dtype=torch.uint8)}
    return entries | {f"{name}{_TENSORS}{path}": tensor for path, tensor in tensors.items()}


def is_of_value(name: str) -> bool:
    """Return True if a stored tensor is a value or a part of one: ranks may have different ones of it."""
    return name.endswith((_TREE, EXTRA_STATE)) or _TENSORS in name


class StoredValues:
    """The values in a source of tensors.

    Args:
        extra: names in the model of values that may also be stored as a tensor of that name, of any shape.
    """

    def __init__(self, source: TensorSource, extra: frozenset[str]) -> None:
        self._source = source
        trees = [name.removesuffix(_TREE) for name in source.names if name.endswith(_TREE)]
        self._tensors: dict[str, dict[str, str]] = {name: {} for name in trees}
        for name in source.names:
            owner, _, path = name.partition(_TENSORS)
            if owner in self._tensors and path:
                self._tensors[owner][path] = name
        self.names = frozenset(trees) | {name for name in extra if name in source}
        self._hidden = {f"{name}{_TREE}" for name in trees} | set(extra)
        self._hidden |= {name for paths in self._tensors.values() for name in paths.values()}

    def read(self, name: str) -> Any:
        """One value; its tensors are on the host."""
        if name not in self._tensors:
            return self._source.read(name)
        text = self._source.read(f"{name}{_TREE}")
        if text.dtype != torch.uint8 or text.dim() != 1:
            raise CheckpointError(f"{name}{_TREE} is not the bytes of a JSON tree")
        tree = strict_json.parse(text.numpy().tobytes(), f"{name}{_TREE}")
        tensors = {path: self._source.read(stored) for path, stored in self._tensors[name].items()}
        return decode(tree, tensors)

    def others(self) -> TensorSource:
        """The tensors of the source that are not part of a value."""
        return _Others(self._source, self._hidden) if self._hidden else self._source


class _Others(TensorSource):
    """A source of tensors, some of them left out."""

    def __init__(self, source: TensorSource, hidden: set[str]) -> None:
        super().__init__({name: source.shaped(name) for name in source.names if name not in hidden})
        self._source = source

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        return self._source.read(name, wanted)


def same_value(one: Any, other: Any) -> bool:
    """Return True if both would be saved as the same bits."""
    (tree, tensors), (other_tree, others) = encode(one), encode(other)
    if strict_json.dump(tree, "a value") != strict_json.dump(other_tree, "a value"):
        return False
    return all(same_bits(tensors[name], others[name]) for name in tensors)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of a model's own methods, while it takes or gives its state, become errors that name `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
