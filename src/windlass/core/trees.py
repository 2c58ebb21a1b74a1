"""Tensors in nests of lists, tuples and maps, as batches and results come: one function over all of them.

The names are those that scripts know. Nothing here speaks to another process; `dist/operations.py` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import DataError


@dataclass
class TensorInformation:
    """What must be known of a tensor to make room for it."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(value: Any) -> bool:
    """Whether `value` is a tensor."""
    return isinstance(value, Tensor)


def is_tensor_information(value: Any) -> bool:
    """Whether `value` describes a tensor instead of being one."""
    return isinstance(value, TensorInformation)


def is_namedtuple(value: Any) -> bool:
    """Whether `value` is a tuple with named fields, which is built from arguments instead of from one sequence."""
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def honor_type(value: Any, items: Iterable[Any]) -> Any:
    """A sequence of the type of `value` (a list, a tuple or a named tuple) with these items."""
    return type(value)(*items) if is_namedtuple(value) else type(value)(items)


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A map of the type of `value` with these items."""
    if isinstance(value, defaultdict):
        return type(value)(value.default_factory, items)
    return type(value)(items)  # type: ignore[call-arg]


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """The same nest with `func(leaf, *args, **kwargs)` in place of each leaf that `test_type` accepts.

    Other leaves stay as they are.

    Raises:
        TypeError: with `error_on_other_type`, a leaf that `test_type` does not accept.
    """

    def visit(part: Any) -> Any:
        if isinstance(part, tuple | list):
            return honor_type(part, (visit(item) for item in part))
        if isinstance(part, Mapping):
            return _like(part, {key: visit(item) for key, item in part.items()})
        if test_type(part):
            return func(part, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{func.__name__} takes tensors, and lists, tuples and dicts of them; it was given a "
                f"{type(part).__name__}"
            )
        return part

    return visit(data)


def tensors_of(data: Any, operation: str) -> list[Tensor]:
    """The tensors of a nest, in order.

    Raises:
        TypeError: something else is among them; the message names `operation`.
    """
    found: list[Tensor] = []

    def take(tensor: Tensor) -> None:
        found.append(tensor)

    take.__name__ = operation
    recursively_apply(take, data, error_on_other_type=True)
    return found


def with_tensors(data: Any, tensors: Iterable[Any]) -> Any:
    """The same nest with these in place of its tensors, in the order of `tensors_of`."""
    stock = iter(tensors)
    return recursively_apply(lambda _: next(stock), data)


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

    def visit(part: Any) -> Any:
        if isinstance(part, Tensor) or hasattr(part, "to"):
            return _to(part, device, non_blocking)
        if isinstance(part, tuple | list):
            return honor_type(part, (visit(item) for item in part))
        if isinstance(part, Mapping):
            return _like(part, {key: item if key in skipped else visit(item) for key, item in part.items()})
        return part

    return visit(tensor)


def _to(value: Any, device: Any, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:  # batches of other libraries move, and know nothing of waiting
        return value.to(device)


def get_shape(data: Any) -> Any:
    """The same nest with each tensor's shape, as a list, in its place."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: Any) -> Any:
    """The same nest with a `TensorInformation` in place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The same nest with an uninitialised host tensor in place of each `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor of a nest; None where there is none."""
    if isinstance(data, Tensor):
        return data.device
    items: Iterable[Any] = data.values() if isinstance(data, Mapping) else data
    if not isinstance(data, Mapping | tuple | list):
        return None
    return next((device for item in items if (device := find_device(item)) is not None), None)


def find_batch_size(data: Any) -> int:
    """The first axis of the first tensor of a nest.

    Raises:
        ValueError: the nest is empty.
        TypeError: its first leaf is no tensor.
    """
    if isinstance(data, tuple | list | Mapping):
        if len(data) == 0:
            raise DataError(f"an empty {type(data).__name__} has no batch size")
        return find_batch_size(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    if not isinstance(data, Tensor):
        raise TypeError(f"only tensors have a batch size; found a {type(data).__name__}")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """As `find_batch_size`, with None where there is none to be found."""
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
    """One nest out of a list of nests of the same form, their tensors joined along `dim`.

    Raises:
        TypeError: leaves that are no tensors, unless there is one nest only.
    """
    first = data[0]
    if isinstance(first, tuple | list):
        columns = [[part[i] for part in data] for i in range(len(first))]
        return honor_type(first, (concatenate(column, dim) for column in columns))
    if isinstance(first, Mapping):
        return _like(first, {key: concatenate([part[key] for part in data], dim) for key in first})
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(f"only tensors can be joined; found a {type(first).__name__}")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """The same nest with its last sample repeated until the batch can be shared out evenly.

    Args:
        tensor: a nest of tensors of `batch_size` samples along axis `dim`.
        num_processes: how many parts there shall be.
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
