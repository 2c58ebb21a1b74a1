"""Trees of tensors, as models return them: taken apart, padded, joined and put back together.

A tree is described by a *spec* that JSON can carry, so that a rank which saw no batch can rebuild what the others saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.errors import ModelError

PADDING = -100
"""What fills the gap where batches of different widths are joined; the label value that losses ignore."""

Spec = Any
"""`None`, `"tensor"`, `["tuple", [spec, ...]]`, `["list", [spec, ...]]` or `["dict", [[key, spec], ...]]`."""

Shape = tuple[int, ...]


def flatten(tree: Any, path: str = "") -> tuple[Spec, list[Tensor]]:
    """Take a tree apart into its spec and its tensors, in order.

    Numpy arrays and numbers become tensors. Subclasses of tuple and of mapping become plain tuples and dicts.

    Raises:
        ModelError: a leaf is neither a tensor nor a number; names its place in the tree.
    """
    if tree is None:
        return None, []
    if isinstance(tree, Tensor):
        return "tensor", [tree]
    if isinstance(tree, np.ndarray | np.generic | int | float):
        return "tensor", [_as_tensor(tree, path)]
    if isinstance(tree, Mapping):
        parts = [(key, *flatten(value, f"{path}[{key!r}]")) for key, value in tree.items()]
        return ["dict", [[key, spec] for key, spec, _ in parts]], [
            leaf for *_, leaves in parts for leaf in leaves
        ]
    if isinstance(tree, tuple | list):
        branches = [flatten(value, f"{path}[{index}]") for index, value in enumerate(tree)]
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return [kind, [spec for spec, _ in branches]], [leaf for _, leaves in branches for leaf in leaves]
    raise ModelError(
        f"evaluation can only collect tensors, numbers and tuples, lists or dicts of them; found {type(tree).__name__}"
        f"{' at ' + path if path else ''}: name it in ignore_keys, or reduce it in preprocess_logits_for_metrics"
    )


def _as_tensor(value: Any, path: str) -> Tensor:
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        place = f" at {path}" if path else ""
        raise ModelError(f"evaluation can only collect numeric arrays; found dtype {array.dtype}{place}")
    return torch.as_tensor(array)


def unflatten(spec: Spec, leaves: Sequence[Any]) -> Any:
    """Put a tree back together; the inverse of `flatten` (any kind of leaf)."""
    stock = iter(leaves)

    def build(part: Spec) -> Any:
        if part is None:
            return None
        if part == "tensor":
            return next(stock)
        kind, children = part
        if kind == "dict":
            return {key: build(child) for key, child in children}
        return tuple(map(build, children)) if kind == "tuple" else [build(child) for child in children]

    return build(spec)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with `change` applied to each of its tensors; anything else is left as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        values = [map_tensors(value, change) for value in tree]
        return tuple(values) if isinstance(tree, tuple) else values
    return tree


def nested_detach(tree: Any) -> Any:
    """The same tree with every tensor cut from its graph."""
    return map_tensors(tree, Tensor.detach)


def nested_numpy(tree: Any) -> Any:
    """The same tree in host memory as numpy arrays; types that numpy lacks (bfloat16, float8) become float32."""
    return map_tensors(tree, lambda tensor: to_numpy(tensor.detach().cpu()))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A host tensor as a numpy array, sharing memory where numpy knows the type."""
    return tensor.to(numpy_dtype(tensor.dtype)).numpy()


def numpy_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype` itself, or float32 for the short floating-point types that numpy lacks."""
    lacking = dtype.is_floating_point and (dtype.itemsize == 1 or dtype == torch.bfloat16)
    return torch.float32 if lacking else dtype


def batch_size_of(tree: Any) -> int | None:
    """Length of the first axis of the first tensor with one; None where the tree holds no such tensor."""
    if isinstance(tree, Tensor | np.ndarray):
        return int(tree.shape[0]) if tree.ndim else None
    branches = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return next((size for size in map(batch_size_of, branches) if size is not None), None)


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
