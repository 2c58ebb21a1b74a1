"""What evaluation loops of scripts do with nests of tensors and arrays: detach, pad, join, cut, collect, gather.

Containers keep their type, as everywhere (`windlass.core.trees`). Arrays are joined along the first axis; if their
second axes differ, the shorter rows are filled with `padding_index`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from windlass.config.enums import ParallelMode
from windlass.core.trees import detach, honor_type, leaves, map_leaves, recursively_apply
from windlass.metrics.kept_rows import PADDING, as_rows, pad_concat, to_numpy

Array = np.ndarray[Any, Any]
nested_detach = detach


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def find_batch_size(tensors: Any) -> int | None:
    """The first axis of the first tensor or array of a nest that has axes; None if there is none."""
    return next((len(part) for part in leaves(tensors) if _is_array(part) and part.ndim), None)


def nested_numpify(tensors: Any) -> Any:
    """The same nest as numpy arrays on the host; bf16 becomes float32, which numpy has. Waits for the device. Raises
    TypeError for a leaf that is not a tensor.
    """

    def numpify(tensor: Tensor) -> Array:
        return to_numpy(tensor.detach().cpu())

    return recursively_apply(numpify, tensors, error_on_other_type=True)


def nested_truncate(tensors: Any, limit: int) -> Any:
    """The same nest with the first `limit` rows of every part."""
    return map_leaves(
        lambda part: part[:limit], tensors, lambda part: not isinstance(part, Mapping | list | tuple)
    )


def nested_new_like(arrays: Any, num_samples: int, padding_index: int = PADDING) -> Any:
    """The same nest with arrays of `num_samples` rows, all filled with `padding_index`."""
    return map_leaves(
        lambda array: np.full_like(array, padding_index, shape=(num_samples, *array.shape[1:])),
        arrays,
        _is_array,
    )


def expand_like(arrays: Array, new_seq_length: int, padding_index: int = PADDING) -> Array:
    """The array with its second axis grown to `new_seq_length`."""
    grown = np.full_like(arrays, padding_index, shape=(len(arrays), new_seq_length, *arrays.shape[2:]))
    grown[:, : arrays.shape[1]] = arrays
    return grown


def atleast_1d(tensor_or_array: Any) -> Any:
    """The tensor or array with at least one axis; numbers become arrays."""
    if isinstance(tensor_or_array, Tensor):
        return as_rows(tensor_or_array)
    return np.atleast_1d(tensor_or_array)


def torch_pad_and_concatenate(tensor1: Tensor, tensor2: Tensor, padding_index: int = PADDING) -> Tensor:
    """Two tensors joined along the first axis."""
    return pad_concat([tensor1, tensor2], padding=padding_index)


def numpy_pad_and_concatenate(array1: Array, array2: Array, padding_index: int = PADDING) -> Array:
    """Two arrays joined along the first axis; shorter rows are padded, in the type of the first array."""
    array1, array2 = np.atleast_1d(array1), np.atleast_1d(array2)
    if array1.ndim == 1 or array1.shape[1] == array2.shape[1]:
        return np.concatenate((array1, array2))
    width = max(array1.shape[1], array2.shape[1])
    rows = (array1, array2.astype(array1.dtype))
    return np.concatenate([expand_like(array, width, padding_index) for array in rows])


def nested_concat(tensors: Any, new_tensors: Any, padding_index: int = PADDING) -> Any:
    """Two nests of one form, their tensors or arrays joined along the first axis. Raises TypeError if the nests differ
    in form, or hold something else.
    """
    if isinstance(tensors, Tensor) and isinstance(new_tensors, Tensor):
        return torch_pad_and_concatenate(tensors, new_tensors, padding_index)
    if type(tensors) is not type(new_tensors):
        raise TypeError(f"a {type(tensors).__name__} cannot be joined with a {type(new_tensors).__name__}")
    if isinstance(tensors, list | tuple):
        pairs = zip(tensors, new_tensors, strict=True)
        return honor_type(tensors, (nested_concat(a, b, padding_index) for a, b in pairs))
    if isinstance(tensors, Mapping):
        joined = {key: nested_concat(part, new_tensors[key], padding_index) for key, part in tensors.items()}
        return joined if type(tensors) is dict else type(tensors)(joined)  # type: ignore[call-arg]
    if isinstance(tensors, np.ndarray):
        return numpy_pad_and_concatenate(tensors, new_tensors, padding_index)
    raise TypeError(f"only tensors and arrays can be joined; found a {type(tensors).__name__}")


def denumpify_detensorize(metrics: Any) -> Any:
    """The same nest with Python numbers in place of numpy's and of tensors of one element. Waits for the device."""

    def is_number(part: Any) -> bool:
        return isinstance(part, np.generic) or (isinstance(part, Tensor) and part.numel() == 1)

    return map_leaves(lambda number: number.item(), metrics, is_number)


class EvalLoopContainer:
    """Collects what a loop of evaluations yields.

    Args:
        do_nested_concat: join each nest with those before it, padded; otherwise keep a list of them.
        padding_index: what shorter rows are filled with.

    Attributes:
        tensors: what was added since the last `to_cpu_and_numpy`; None if nothing was.
        arrays: what was moved to the host before; None if nothing was.
    """

    def __init__(self, do_nested_concat: bool = True, padding_index: int = PADDING) -> None:
        self.do_nested_concat, self.padding_index = do_nested_concat, padding_index
        self.tensors: Any = None
        self.arrays: Any = None

    def add(self, tensors: Any) -> None:
        """Take in the nest of one batch."""
        self.tensors = self._joined(self.tensors, tensors if self.do_nested_concat else [tensors])

    def to_cpu_and_numpy(self) -> None:
        """Move what was added to the host, as numpy arrays. Waits for the device."""
        if self.tensors is not None:
            self.arrays = self._joined(self.arrays, nested_numpify(self.tensors))
            self.tensors = None

    def get_arrays(self) -> Any:
        """Everything that was added, as numpy arrays; None if nothing was."""
        self.to_cpu_and_numpy()
        return self.arrays

    def _joined(self, earlier: Any, later: Any) -> Any:
        if earlier is None:
            return later
        return (
            nested_concat(earlier, later, self.padding_index) if self.do_nested_concat else [*earlier, *later]
        )


def distributed_concat(tensor: Any, num_total_examples: int | None = None) -> Any:
    """The same nest with the tensors of all processes joined along the first axis; collective. Raises RuntimeError if
    there is no process group.

    Args:
        tensor: a nest whose tensors have the same shape on every process.
        num_total_examples: keep so many rows.
    """

    def joined(part: Tensor) -> Tensor:
        own = as_rows(part).contiguous()  # what is sent is memory, and not a view of it
        parts = [torch.empty_like(own) for _ in range(_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts)[:num_total_examples]

    return map_leaves(joined, tensor)


def distributed_broadcast_scalars(
    scalars: Sequence[float], num_total_examples: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """The numbers of all processes in one tensor, in the order of ranks; collective.

    Args:
        scalars: as many on every process.
        num_total_examples: keep so many numbers.
        device: where the exchange takes place; by default where this process computes.
    """
    chosen = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    gathered: Tensor = distributed_concat(torch.tensor(scalars, device=chosen), num_total_examples)
    return gathered


def nested_gather(tensors: Any, parallel_mode: Any, name: str | None = None) -> Any:
    """The nests of all processes as one; the nest itself if `parallel_mode` is not `ParallelMode.DISTRIBUTED`."""
    # A script may still have the mode from its old library.
    distributed = getattr(parallel_mode, "value", parallel_mode) == ParallelMode.DISTRIBUTED.value
    return distributed_concat(tensors) if distributed and tensors is not None else tensors


def _world_size() -> int:
    if not dist.is_initialized():
        raise RuntimeError("there is no process group: start the script with `windlass launch` or torchrun")
    return dist.get_world_size()
