"""Outputs of a model, taken apart into tensors whose batches are padded and joined.

Their structure is one that JSON can carry, so that a rank which saw no batch can rebuild what the others saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.trees import Spec, flatten

PADDING = -100
"""What fills the gap where batches of different widths are joined; the label value that losses ignore."""

Shape = tuple[int, ...]


def take_apart(tree: Any) -> tuple[Spec, list[Tensor]]:
    """The structure of what a model returned, and its tensors in order; numpy arrays and numbers become tensors.

    Raises:
        ModelError: a leaf is neither a tensor nor a number; names its place in the tree.
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
    """A host tensor as a numpy array, sharing memory where numpy knows the type."""
    return tensor.to(numpy_dtype(tensor.dtype)).numpy()


def numpy_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype` itself, or float32 for the short floating-point types that numpy lacks."""
    lacking = dtype.is_floating_point and (dtype.itemsize == 1 or dtype == torch.bfloat16)
    return torch.float32 if lacking else dtype


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor with at least one axis: a scalar counts as one row."""
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def widest(shapes: Sequence[Shape], what: str) -> Shape:
    """The smallest row that holds a row of each of `shapes` (first axes left out).

    Raises:
        ModelError: the shapes differ in their number of axes.
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
    """Room for `rows` rows as wide as the widest of `shapes`; filled with `padding` only where some are narrower."""
    width = widest(shapes, what)
    if all(shape[1:] == width for shape in shapes):
        return torch.empty((rows, *width), dtype=dtype)
    return torch.full((rows, *width), padding, dtype=dtype)


def place(out: Tensor, rows: slice | Tensor, block: Tensor) -> None:
    """Write a block, narrower than `out` or not, into the given rows of `out`."""
    out[(rows, *(slice(size) for size in block.shape[1:]))] = block.to(device=out.device, dtype=out.dtype)


def pad_concat(blocks: Sequence[Tensor], what: str = "tensors", padding: int = PADDING) -> Tensor:
    """Join tensors along the first axis, padding every other axis to the widest; one copy of each element.

    Returns a tensor on the device of the first block. An empty sequence is an error of the caller.
    """
    rows = [as_rows(block) for block in blocks]
    dtype = rows[0].dtype
    for block in rows[1:]:
        dtype = torch.promote_types(dtype, block.dtype)
    shapes = [tuple(block.shape) for block in rows]
    out = blank(sum(shape[0] for shape in shapes), shapes, dtype, what, padding).to(rows[0].device)
    start = 0
    for block in rows:
        place(out, slice(start, start + block.shape[0]), block)
        start += block.shape[0]
    return out
