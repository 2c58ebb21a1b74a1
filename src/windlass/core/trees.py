"""Nests: tensors in lists, tuples and mappings, as batches and results come. The one module that walks them.

Containers keep their type: mappings (subclasses of dict with attributes of their own too), named tuples, lists, tuples
and their subclasses. If the constructor of a type does not take the items, a plain dict, list or tuple is made.
Everything else is a leaf.

Most names are those that scripts know. Nothing here communicates with another process; `dist/operations.py` does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.device import copies_may_wait
from windlass.core.errors import DataError

Spec = Any
"""Structure of a nest, as JSON carries it: `None`, `"leaf"`, `["tuple", [spec, ...]]`, `["list", [spec, ...]]` or
`["dict", [[key, spec], ...]]`.
"""


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor, by which another process makes room for it."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(value: Any) -> bool:
    """Return True if `value` is a tensor."""
    return isinstance(value, Tensor)


def is_tensor_information(value: Any) -> bool:
    """Return True if `value` describes a tensor instead of being one."""
    return isinstance(value, TensorInformation)


def is_namedtuple(value: Any) -> bool:
    """Return True for a tuple with named fields, which is built from arguments instead of from one sequence."""
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def honor_type(value: Any, items: Iterable[Any]) -> Any:
    """A sequence of the type of `value` (a list, a tuple or a named tuple) with these items."""
    if is_namedtuple(value):
        return type(value)(*items)
    plain = list if isinstance(value, list) else tuple
    return _built(type(value), plain(items))


def mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of `value`, with its attributes and these items."""
    if type(value) is dict:
        return items
    if not isinstance(value, dict):
        return _built(type(value), items)
    clone: Any = copy.copy(value)
    for key, item in items.items():  # not `update`, which outputs of Transformers refuse
        clone[key] = item
    return clone


def _built(kind: Callable[[Any], Any], items: Any) -> Any:
    try:
        return kind(items)
    except TypeError:  # its constructor takes something else
        return items


def map_leaves(
    change: Callable[[Any], Any], nest: Any, is_leaf: Callable[[Any], bool] = is_torch_tensor
) -> Any:
    """The same nest with `change(part)` in place of each part that `is_leaf` accepts; containers may be among them.

    Other leaves stay as they are. Containers are new ones.
    """
    if is_leaf(nest):
        return change(nest)
    if isinstance(nest, Mapping):
        return mapping_like(nest, {key: map_leaves(change, item, is_leaf) for key, item in nest.items()})
    if isinstance(nest, tuple | list):
        return honor_type(nest, [map_leaves(change, item, is_leaf) for item in nest])
    return nest


def leaves(nest: Any) -> Iterator[Any]:
    """Everything in a nest that is not a container, in order."""
    if not isinstance(nest, Mapping | tuple | list):
        yield nest
        return
    for item in nest.values() if isinstance(nest, Mapping) else nest:
        yield from leaves(item)


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """The tensors of a nest, in order."""
    return filter(is_torch_tensor, leaves(nest))


def flatten(nest: Any, leaf: Callable[[Any, str], Any], path: str = "") -> tuple[Spec, list[Any]]:
    """Take a nest apart into its structure and `leaf(part, path)` of its leaves, in order; None is structure.

    Subclasses of tuple, list and mapping count as plain ones.
    """
    if nest is None:
        return None, []
    if isinstance(nest, Mapping):
        kind, parts = "dict", [flatten(item, leaf, f"{path}[{key!r}]") for key, item in nest.items()]
        children: list[Any] = [[key, spec] for key, (spec, _) in zip(nest, parts, strict=True)]
    elif isinstance(nest, tuple | list):
        kind = "tuple" if isinstance(nest, tuple) else "list"
        parts = [flatten(item, leaf, f"{path}[{index}]") for index, item in enumerate(nest)]
        children = [spec for spec, _ in parts]
    else:
        return "leaf", [leaf(nest, path)]
    return [kind, children], [item for _, found in parts for item in found]


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Put a nest back together; the inverse of `flatten`, with any kind of leaf."""
    stock = iter(leaves)

    def build(part: Spec) -> Any:
        if part is None:
            return None
        if part == "leaf":
            return next(stock)
        kind, children = part
        if kind == "dict":
            return {key: build(child) for key, child in children}
        return tuple(map(build, children)) if kind == "tuple" else [build(child) for child in children]

    return build(spec)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """The same nest with `func(leaf, *args, **kwargs)` in place of each leaf that `test_type` accepts.

    Other leaves stay as they are. Raises TypeError for with `error_on_other_type`, a leaf that `test_type` does not
    accept.
    """

    def apply(part: Any) -> Any:
        if test_type(part):
            return func(part, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(_only_tensors(func.__name__, part))
        return part

    return map_leaves(apply, data, lambda part: not isinstance(part, Mapping | tuple | list))


def _only_tensors(operation: str, part: Any) -> str:
    return f"{operation} takes tensors, and lists, tuples and dicts of them; it was given a {type(part).__name__}"


def tensors_of(data: Any, operation: str) -> list[Tensor]:
    """The tensors of a nest that holds nothing else, in order. Raises TypeError if something else is among them; the
    message names `operation`.
    """
    found = list(leaves(data))
    for part in found:
        if not isinstance(part, Tensor):
            raise TypeError(_only_tensors(operation, part))
    return found


def with_tensors(data: Any, tensors: Iterable[Any]) -> Any:
    """The same nest with these in place of its tensors, in the order of `tensors_of`."""
    stock = iter(tensors)
    return map_leaves(lambda _: next(stock), data)


def detach(nest: Any) -> Any:
    """The same nest with every tensor cut from its graph."""
    return map_leaves(Tensor.detach, nest)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """The same nest on `device`.

    Args:
        tensor: tensors, anything else with a `to` method (a tokenizer's batch), and nests of them.
        non_blocking: do not wait for copies from pinned memory.
        skip_keys: keys of maps whose values stay where they are.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []

    def holds_skipped(part: Any) -> bool:
        return isinstance(part, Mapping) and any(key in part for key in skipped)

    def move(part: Any) -> Any:
        if hasattr(part, "to"):
            return _to(part, device, non_blocking)
        moved = {
            key: item if key in skipped else send_to_device(item, device, non_blocking, skipped)
            for key, item in part.items()
        }
        return mapping_like(part, moved)

    return map_leaves(move, tensor, lambda part: hasattr(part, "to") or holds_skipped(part))


def _to(value: Any, device: Any, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking and copies_may_wait(torch.device(device)))
    except TypeError:
        if isinstance(value, Tensor):
            raise
        return value.to(device)  # batches of other libraries move, and know nothing of waiting


def get_shape(data: Any) -> Any:
    """The same nest with each tensor's shape, as a list, in its place."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: Any) -> Any:
    """The same nest with a `TensorInformation` in place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The same nest with an uninitialised host tensor in place of each `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor of a nest; None if it has no tensor."""
    return next((tensor.device for tensor in tensors_in(data)), None)


def batch_size_of(batch: Any) -> int | None:
    """Samples in a batch: the first axis of its first tensor that has one, or else of its first such array.

    None if it has neither.
    """
    parts = list(leaves(batch))
    for kind in (Tensor, np.ndarray):
        for part in parts:
            if isinstance(part, kind) and part.ndim:
                return len(part)
    return None


def find_batch_size(data: Any) -> int:
    """The first axis of the first tensor of a nest.

    Raises:
        ValueError: the nest is empty.
        TypeError: its first leaf is not a tensor.
    """
    if isinstance(data, tuple | list | Mapping):
        if len(data) == 0:
            raise DataError(f"an empty {type(data).__name__} has no batch size")
        return find_batch_size(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    if not isinstance(data, Tensor):
        raise TypeError(f"only tensors have a batch size; found a {type(data).__name__}")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """As `find_batch_size`, but None if there is none to be found."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def listify(data: Any) -> Any:
    """The same nest with each tensor as (a list of) numbers. Waits for the device."""

    def numbers(tensor: Tensor) -> Any:
        return tensor.detach().cpu().tolist()

    return recursively_apply(numbers, data)


def slice_tensors(data: Any, tensor_slice: slice | Any) -> Any:
    """The same nest with `tensor[tensor_slice]` in place of each tensor."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """One nest out of a list of nests of the same form, their tensors joined along `dim`. Raises TypeError for leaves
    that are not tensors, unless there is one nest only.
    """
    first = data[0]
    if isinstance(first, tuple | list):
        columns = [[part[i] for part in data] for i in range(len(first))]
        return honor_type(first, (concatenate(column, dim) for column in columns))
    if isinstance(first, Mapping):
        return mapping_like(first, {key: concatenate([part[key] for part in data], dim) for key in first})
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(f"only tensors can be joined; found a {type(first).__name__}")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """The same nest with its last sample repeated until the batch can be shared out evenly.

    Args:
        tensor: a nest of tensors of `batch_size` samples along axis `dim`.
        num_processes: how many parts to make.
    """
    missing = -batch_size % num_processes

    def pad(part: Tensor) -> Tensor:
        last = part.narrow(dim, part.shape[dim] - 1, 1)
        return torch.cat([part, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def convert_to_fp32(tensor: Any) -> Any:
    """The same nest with fp16 and bf16 tensors widened to fp32."""
    short = (torch.float16, torch.bfloat16)
    return recursively_apply(
        lambda part: part.float(),
        tensor,
        test_type=lambda part: getattr(part, "dtype", None) in short and hasattr(part, "float"),
    )
