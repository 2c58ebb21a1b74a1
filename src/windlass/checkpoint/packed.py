"""Tensors that are made of other tensors, such as averages in 8 bits: split for a checkpoint, and put together again.

A subclass of `torch.Tensor` that PyTorch can flatten (`__tensor_flatten__` returns the names of its tensors, and other
arguments of its constructor) is saved as a map:

    {"windlass.packed": "torchao.optim.subclass_8bit.OptimState8bit", "tensors": {"codes": ..., ...}, "rest": [...]}

Of a sharded one each rank holds such a tensor, whose own tensors are parts of the whole one's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint.tensor_file import Deferred
from windlass.core.errors import CheckpointError
from windlass.core.tensors import dtype_name
from windlass.dist.sharded import Part, copies, from_part, is_even, is_sharded, local, part, shard_flat

_MARK, _DTYPE, _SIZE = "windlass.packed", "windlass.dtype", "windlass.size"
# Look-up tables of codes: the same for every part.
_TABLES = frozenset({"qmap"})


def is_packed_map(value: Any) -> bool:
    """Return True for what `split_packed` made of a tensor."""
    return isinstance(value, dict) and isinstance(value.get(_MARK), str)


def split_packed(value: Tensor) -> dict[str, Any]:
    """The map of a tensor that is made of others (`is_packed`); no copies."""
    inner: Any = local(value)
    names, rest = inner.__tensor_flatten__()
    cls = type(inner)
    tensors = {
        name: _as_sharded(getattr(inner, name), name, inner, value)
        if is_sharded(value)
        else getattr(inner, name)
        for name in names
    }
    return {
        _MARK: f"{cls.__module__}.{cls.__qualname__}",
        "tensors": tensors,
        "rest": [_plain(argument) for argument in rest],
    }


def _as_sharded(tensor: Tensor, name: str, inner: Tensor, outer: Any) -> Tensor:
    """A part's own tensor as a part of the whole one's; a table as it is."""
    if name in _TABLES:
        return tensor
    if tensor.shape == inner.shape:
        return from_part(tensor, outer)
    _check_even(outer)
    return shard_flat(tensor, outer)


def _check_even(outer: Any) -> None:
    if not is_even(outer):
        parts = outer.device_mesh.size() // copies(outer)
        raise CheckpointError(
            f"the optimizer keeps blocks of a parameter of shape {list(outer.shape)} in {parts} parts of "
            "different sizes, which cannot be joined; use an optimizer whose state has its parameters' shapes, such as "
            "adamw_torch"
        )


def _plain(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return {_DTYPE: dtype_name(argument)}
    return {_SIZE: list(argument)} if isinstance(argument, torch.Size | tuple) else argument


def join_packed(saved: dict[str, Any], parameter: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor of which `saved` is the map, sharded as `parameter` is. Raises CheckpointError if the class is not
    loaded in this process, or cannot be made of what is saved.

    Args:
        saved: its tensors may be `Deferred`.
        place: copies a tensor to the parameter's device.
    """
    cls = _class_of(saved[_MARK])
    tensors = saved["tensors"]
    try:
        inner = {name: place(_part_of(tensor, name, parameter)) for name, tensor in tensors.items()}
        rest = [_argument(argument, local(parameter)) for argument in saved["rest"]]
        # The last two, the outer size and stride, are not read by the classes of torchao.
        made: Tensor = cls.__tensor_unflatten__(inner, rest, None, None)
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, RuntimeError) as error:
        raise CheckpointError(f"a saved {saved[_MARK]} cannot be put together: {error}") from error
    if made.shape != local(parameter).shape:
        raise CheckpointError(
            f"a saved {saved[_MARK]} has shape {list(made.shape)}, its parameter {list(local(parameter).shape)}"
        )
    return from_part(made, parameter)


def _class_of(name: str) -> Any:
    """The class, if its module was imported already: the optimizer that needs it did so. Nothing is imported."""
    module, _, attribute = name.rpartition(".")
    cls = getattr(sys.modules.get(module), attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, Tensor) and hasattr(cls, "__tensor_unflatten__")):
        raise CheckpointError(
            f"the optimizer state holds tensors of type {name}, which is not loaded: make the optimizer of the same "
            "class and library as when it was saved"
        )
    return cls


def _part_of(tensor: Any, name: str, parameter: Tensor) -> Tensor:
    """This rank's part of a saved tensor."""
    if not is_sharded(parameter) or name in _TABLES:
        return tensor.read() if isinstance(tensor, Deferred) else tensor
    here = part(parameter)
    if tuple(tensor.shape) != tuple(parameter.shape):
        _check_even(parameter)
        rows = parameter.shape[0]
        if tensor.ndim != 1 or (tensor.numel() * here.sizes[0]) % rows:
            raise ValueError(f"{name!r} of shape {list(tensor.shape)} cannot be cut as its parameter is")
        # Codes and scales are in the order of the elements: a share of the rows is that share of them.
        here = Part((tensor.numel() * here.offsets[0] // rows,), (tensor.numel() * here.sizes[0] // rows,))
    return tensor.read(here) if isinstance(tensor, Deferred) else here.of(tensor)


def _argument(argument: Any, inner: Tensor) -> Any:
    if isinstance(argument, dict) and _DTYPE in argument:
        return getattr(torch, argument[_DTYPE])
    return inner.shape if isinstance(argument, dict) and _SIZE in argument else argument
