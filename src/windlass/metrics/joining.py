"""Flattening the outputs of a model into tensors, and joining the tensors of several batches with padding.

The structure is JSON, so that a rank without a batch can rebuild the outputs of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.trees import Spec, flatten

PADDING = -100
"""Fills the difference between batches of different widths; losses ignore this label."""

Shape = tuple[int, ...]


def take_apart(tree: Any) -> tuple[Spec, list[Tensor]]:
    """Return the structure of a model's output and its tensors in order. Arrays and numbers become tensors. Raises
    ModelError if a leaf is neither a tensor nor a number; its path is named.
    """
    return flatten(tree, _as_tensor)


def _as_tensor(value: Any, path: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    place = f" at {path}" if path else ""
    if not isinstance(value, np.ndarray | np.generic | int | float):
        raise ModelError(
            "evaluation can only collect tensors, numbers and tuples, lists or dicts of them; found "
            f"{type(value).__name__}{place}: name it in ignore_keys, or reduce it in preprocess_logits_for_metrics"
        )
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise ModelError(f"evaluation can only collect numeric arrays; found dtype {array.dtype}{place}")
    return torch.as_tensor(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A host tensor as a numpy array, sharing memory if numpy has the dtype."""
    return tensor.to(numpy_dtype(tensor.dtype)).numpy()


def numpy_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 for bfloat16 and float8, which numpy lacks."""
    lacking = dtype.is_floating_point and (dtype.itemsize == 1 or dtype == torch.bfloat16)
    return torch.float32 if lacking else dtype


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor with at least one axis: a scalar is one row."""
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def widest(shapes: Sequence[Shape], what: str) -> Shape:
    """The size of the smallest row that holds a row of each of `shapes`, whose first axis is ignored. Raises ModelError
    if the shapes differ in their number of axes.
    """
    if len({len(shape) for shape in shapes}) > 1:
        examples = sorted({len(shape): shape for shape in shapes}.values(), key=len)
        raise ModelError(
            f"{what}: batches differ in their number of axes, for example {examples[0]} and {examples[-1]}"
        )
    return tuple(max(sizes) for sizes in zip(*(shape[1:] for shape in shapes), strict=True))


def blank(
    rows: int, shapes: Sequence[Shape], dtype: torch.dtype, what: str, padding: int = PADDING
) -> Tensor:
    """A tensor of `rows` rows as wide as the widest of `shapes`, filled with `padding` if some are narrower."""
    width = widest(shapes, what)
    if all(shape[1:] == width for shape in shapes):
        return torch.empty((rows, *width), dtype=dtype)
    return torch.full((rows, *width), padding, dtype=dtype)


def place(out: Tensor, rows: slice | Tensor, block: Tensor) -> None:
    """Write a block, which may be narrower, into the given rows of `out`."""
    out[(rows, *(slice(size) for size in block.shape[1:]))] = block.to(device=out.device, dtype=out.dtype)


def pad_concat(blocks: Sequence[Tensor], padding: int = PADDING) -> Tensor:
    """Join tensors along the first axis, padding every other axis to the widest; one copy of each element. `blocks`: at
    least one; the result is on the device of the first.
    """
    rows = [as_rows(block) for block in blocks]
    dtype = functools.reduce(torch.promote_types, (block.dtype for block in rows))
    shapes = [tuple(block.shape) for block in rows]
    out = blank(sum(shape[0] for shape in shapes), shapes, dtype, "tensors", padding).to(rows[0].device)
    start = 0
    for block in rows:
        place(out, slice(start, start + block.shape[0]), block)
        start += block.shape[0]
    return out
