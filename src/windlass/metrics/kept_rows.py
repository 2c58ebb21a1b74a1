"""The outputs that an evaluation keeps, and joining those of all ranks into one array in the order of the dataset.

Batches are kept as they are and joined once at the end, each copied into its place: the work is linear in the number of
samples, and no array exists twice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.tensors import dtype_name
from windlass.core.trees import Spec, flatten, unflatten
from windlass.dist.gang import Gang
from windlass.dist.lockstep import exchange_messages

# Flattening the outputs of a model into tensors, and joining the tensors of several batches with padding.
#
# The structure is JSON, so that a rank without a batch can rebuild the outputs of the others.

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
    """A tensor of `rows` rows as wide as the widest of `shapes`, filled with `padding` if some are narrower. Raises
    ModelError if it is to be filled, and the dtype does not have that value: a mask would be filled with True.
    """
    width = widest(shapes, what)
    if all(shape[1:] == width for shape in shapes):
        return torch.empty((rows, *width), dtype=dtype)
    if torch.full((), padding, dtype=dtype).item() != padding:
        raise ModelError(
            f"{what}: batches of {dtype} differ in their widths, and {padding}, which fills the difference, is not a "
            "value of that type: convert them to a type that has it (`.int()`), give all batches one width, or set "
            "eval_do_concat_batches=False"
        )
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


@dataclass(frozen=True)
class BatchOrder:
    """The samples of every batch of every rank."""

    counts: list[list[int]]  # for each rank, the number of samples of each of its batches
    # For each rank, the dataset positions of all its samples, int64 of shape (sum of counts,); None if a batch had no
    # positions
    ids: list[Tensor] | None

    def rows(self, blocks: list[list[int]]) -> list[list[slice | Tensor]]:
        """The rows of each batch in the joined array.

        With one row per sample: by dataset position. Otherwise (outputs flattened over tokens, scalars): whole batches
        by the position of their first sample. Without positions: batches in turn, rank by rank. `blocks`: for each
        rank, the number of rows of each of its batches.
        """
        # As many rows as samples in every batch: a row is then that of a sample.
        if self.ids is not None and blocks == self.counts:
            return self._rows_by_id(self.ids)
        return self._rows_by_batch(blocks)

    def _rows_by_id(self, ids: list[Tensor]) -> list[list[slice | Tensor]]:
        order = torch.argsort(torch.cat(ids), stable=True)
        target = torch.empty_like(order)
        target[order] = torch.arange(order.numel())
        shares = torch.split(target, [rank_ids.numel() for rank_ids in ids])
        return [list(torch.split(share, counts)) for share, counts in zip(shares, self.counts, strict=True)]

    def _rows_by_batch(self, blocks: list[list[int]]) -> list[list[slice | Tensor]]:
        places: list[list[slice | Tensor]] = [[slice(0)] * len(rank_blocks) for rank_blocks in blocks]
        start = 0
        for rank, index in self.batches():
            count = blocks[rank][index]
            places[rank][index] = slice(start, start + count)
            start += count
        return places

    def batches(self) -> list[tuple[int, int]]:
        """(rank, index) of all batches in the order in which they are joined."""
        keys = {(rank, i): (i, rank) for rank, counts in enumerate(self.counts) for i in range(len(counts))}
        if self.ids is not None:
            for rank, (rank_ids, counts) in enumerate(zip(self.ids, self.counts, strict=True)):
                for i, part in enumerate(torch.split(rank_ids, counts)):
                    keys[rank, i] = (int(part[0]) if part.numel() else -1, i)
        return sorted(keys, key=lambda batch: (keys[batch], batch))


class OrderLog:
    """Records the samples of each batch of this rank."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._ids: list[int] = []
        self._known = True

    def add(self, ids: Sequence[int], samples: int) -> None:
        self._counts.append(samples)
        self._known = self._known and len(ids) == samples
        self._ids.extend(ids)

    def exchange(self, data_ranks: Gang) -> BatchOrder:
        """The order of all ranks. Collective."""
        messages = exchange_messages(data_ranks, {"counts": self._counts, "known": self._known})
        counts = [message["counts"] for message in messages]
        if not all(message["known"] for message in messages):
            return BatchOrder(counts, None)
        ids = [
            tensor.cpu() for _, _, tensor in data_ranks.stream([torch.tensor(self._ids, dtype=torch.int64)])
        ]
        return BatchOrder(counts, ids)


class RowStore:
    """One field (predictions, labels, inputs or losses) of every batch of this rank.

    Args:
        name: for error messages.
        concat: join batches into one tree; False keeps a list with one tree for each batch.

    Attributes:
        nbytes: bytes kept on this rank.
    """

    def __init__(self, name: str, concat: bool = True) -> None:
        self.name = name
        self._concat = concat
        self._specs: list[Spec] = []
        self._blocks: list[list[Tensor]] = []
        self._on_host = 0
        self.nbytes = 0

    def add(self, tree: Any) -> None:
        """Keep a copy of a batch: the original may be a view of more memory, or be overwritten by the next batch.
        Raises ModelError if batches are to be joined, and the structure of this one differs from the first.
        """
        spec, leaves = take_apart(tree)
        if self._concat and self._specs and spec != self._specs[0]:
            raise ModelError(_different(self.name, len(self._specs), self._specs[0], spec))
        self._specs.append(spec if not self._specs or spec != self._specs[0] else self._specs[0])
        self._blocks.append([leaf.detach().clone() for leaf in leaves])
        self.nbytes += sum(leaf.nbytes for leaf in leaves)

    def to_host(self) -> None:
        """Move batches added since the last call to host memory."""
        for leaves in self._blocks[self._on_host :]:
            leaves[:] = [leaf.cpu() for leaf in leaves]
        self._on_host = len(self._blocks)

    def gather(self, order: BatchOrder, data_ranks: Gang) -> Any:
        """The batches of all ranks as a tree of numpy arrays (or a list of such trees), None if there are none.

        Collective. Empties the store.
        """
        mine = self._specs[:1] if self._concat else self._specs
        specs = [message["specs"] for message in exchange_messages(data_ranks, {"specs": mine})]
        result = (
            self._joined(specs, order, data_ranks) if self._concat else self._listed(specs, order, data_ranks)
        )
        self._specs, self._blocks, self._on_host, self.nbytes = [], [], 0, 0
        return result

    def _joined(self, specs: list[list[Spec]], order: BatchOrder, data_ranks: Gang) -> Any:
        seen = [rank_specs[0] for rank_specs in specs if rank_specs]
        if not seen:
            return None
        for spec in seen[1:]:
            if spec != seen[0]:
                raise ModelError(_different(self.name, 0, seen[0], spec))
        return unflatten(
            seen[0], (to_numpy(self._joined_leaf(leaf, order, data_ranks)) for leaf in itertools.count())
        )

    def _joined_leaf(self, leaf: int, order: BatchOrder, data_ranks: Gang) -> Tensor:
        mine = self._take(leaf)
        headers = _headers(mine, data_ranks)
        rows = order.rows([[shape[0] for _, shape in header] for header in headers])
        shapes = [shape for header in headers for _, shape in header]
        dtypes = sorted({name for header in headers for name, _ in header})
        dtype = functools.reduce(torch.promote_types, (getattr(torch, name) for name in dtypes))
        out = blank(sum(shape[0] for shape in shapes), shapes, numpy_dtype(dtype), self.name)
        for rank, index, block in data_ranks.stream(mine):
            place(out, rows[rank][index], block)
        return out

    def _take(self, leaf: int) -> list[Tensor]:
        """One leaf of every batch, of which only the list has references: `stream` releases them one by one."""
        # So that each tensor is freed once it was sent, and not at the end.
        nothing = torch.empty(0)
        taken = []
        for leaves in self._blocks:
            taken.append(as_rows(leaves[leaf]))
            leaves[leaf] = nothing
        return taken

    def _listed(self, specs: list[list[Spec]], order: BatchOrder, data_ranks: Gang) -> list[Any] | None:
        if all(spec is None for rank_specs in specs for spec in rank_specs):
            return None
        arrays: list[list[Any]] = [[] for _ in specs]
        mine = [leaf for leaves in self._blocks for leaf in leaves]
        self._blocks = []
        for rank, _, tensor in data_ranks.stream(mine):
            arrays[rank].append(to_numpy(tensor.cpu()))
        stocks = map(iter, arrays)  # `unflatten` takes the leaves of one batch after the other
        trees = [
            [unflatten(spec, stock) for spec in of_rank] for of_rank, stock in zip(specs, stocks, strict=True)
        ]
        return [trees[rank][index] for rank, index in order.batches()]


def _headers(blocks: list[Tensor], data_ranks: Gang) -> list[list[tuple[str, Shape]]]:
    """Type name and shape of every rank's blocks."""
    messages = exchange_messages(
        data_ranks, {"blocks": [[dtype_name(block.dtype), list(block.shape)] for block in blocks]}
    )
    return [[(name, tuple(shape)) for name, shape in message["blocks"]] for message in messages]


def _different(name: str, batch: int, first: Spec, other: Spec) -> str:
    return (
        f"the {name} of evaluation batch {batch} are built as {describe(other)}, those of the first batch as "
        f"{describe(first)}: return the same structure for every batch, or set eval_do_concat_batches=False"
    )


def describe(spec: Spec) -> str:
    """A spec as text, such as `(tensor, {'mask': tensor})`."""
    if spec is None or spec == "leaf":
        return "tensor" if spec else "None"
    kind, children = spec
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {describe(child)}" for key, child in children) + "}"
    inner = ", ".join(map(describe, children))
    return f"({inner})" if kind == "tuple" else f"[{inner}]"
