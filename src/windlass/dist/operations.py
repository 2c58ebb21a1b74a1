"""What the processes of a job do together with nests of tensors, under the names that scripts know.

Each call is collective: every process makes it, in the same order. A world of one has nothing to exchange. Tensors in
host memory travel over the host's process group and others over their device's, whatever the main backend is. What
needs to be known of shapes is exchanged on the host, so that no call waits for a device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.device import choose_device
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.tensors import bits_of, dtype_name
from windlass.core.trees import tensors_of, with_tensors
from windlass.dist.beacon import waiting
from windlass.dist.gang import Gang, current
from windlass.dist.sharded import is_in_parts

_REDUCTIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# Types that backends cannot add, and one that they can. The sum of two booleans would be one of the value 2.
_SENT_AS = dict.fromkeys((torch.bool, torch.int16, torch.uint16), torch.int32)
_SENT_AS |= {torch.uint32: torch.int64} | dict.fromkeys(
    (torch.float8_e4m3fn, torch.float8_e5m2), torch.float32
)

Kind = tuple[str, list[int]]
"""Type and shape of a tensor, as they travel."""

_checking = False


class DistributedOperationException(DataError):  # noqa: N818 (the name that scripts catch)
    """Processes called the same operation with tensors that do not fit together."""


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor is left as it is, because its rows have lengths of their own."""


def check_operations(on: bool) -> None:
    """Compare shapes over all processes before `reduce` and `broadcast` too, which costs an exchange on the host."""
    global _checking
    _checking = on


def operations_are_checked() -> bool:
    """Return what `check_operations` set."""
    return _checking


def gather(tensor: Any, *, gang: Gang | None = None) -> Any:
    """The same nest with every process's tensors joined along the first axis, in rank order.

    Args:
        tensor: a nest of tensors. First axes may differ between processes; scalars become vectors of one.

    Raises:
        DistributedOperationException: the tensors of two processes differ in type or in another axis.
        TypeError: a leaf is not a tensor.
    """
    gang = gang or current()
    own = [_at_least_a_vector(t) for t in tensors_of(tensor, "gather")]
    if gang.size == 1:
        return tensor
    _refuse_parts(own, "gather")
    kinds = _kinds_everywhere(own, gang, "gather", free_axis=0)
    return with_tensors(tensor, [_gather_one(t, [k[i] for k in kinds], gang) for i, t in enumerate(own)])


def gather_object(object: Any) -> Any:
    """The lists of all processes, joined in rank order. With one process, the object itself. Raises DataError for a
    value that cannot be sent (see `dist/wire.py`), or something that is not a list.
    """
    gang = current()
    if gang.size == 1:
        return object
    if not isinstance(object, list | tuple):
        raise DataError(
            f"gather_object joins lists; it was given a {type(object).__name__}: wrap it in a list"
        )
    return [item for part in gang.gather_objects(object) for item in part]


def broadcast(tensor: Any, from_process: int = 0, *, gang: Gang | None = None) -> Any:
    """Write the tensors of process `from_process` into those of all others, in place, and give the nest back."""
    gang = gang or current()
    own = tensors_of(tensor, "broadcast")
    if gang.size == 1:
        return tensor
    _check_source("broadcast", from_process, gang)
    _refuse_parts(own, "broadcast")
    if _checking:
        _kinds_everywhere(own, gang, "broadcast")
    for part in own:
        bits = bits_of(part)  # as they gather: every type travels, those that backends do not know too
        with waiting("broadcast tensors"):
            dist.broadcast(bits, group=_group(part, gang), group_src=from_process)
        # Bytes are dense: of a tensor with gaps a copy travelled.
        if bits.data_ptr() != part.data_ptr():
            part.detach().copy_(bits.view(part.dtype).reshape(part.shape))
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of the list, in place, by those of process `from_process`. Raises DataError for a value that
    cannot be sent, named (see `dist/wire.py`).
    """
    gang = current()
    _check_source("broadcast_object_list", from_process, gang)
    object_list[:] = gang.broadcast_object(list(object_list), from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, gang: Gang | None = None) -> Any:
    """The same nest with the mean, sum or maximum over processes in place of each tensor, as new tensors.

    What comes out is a value to report: no gradient flows back through it.

    Args:
        reduction: "mean", "sum" or "max".
        scale: multiplies the result.
    """
    gang = gang or current()
    if reduction not in _REDUCTIONS:
        raise ConfigError(Problem("reduce.reduction", reduction, f"must be one of {', '.join(_REDUCTIONS)}"))
    own = tensors_of(tensor, "reduce")
    if gang.size > 1:
        _refuse_parts(own, "reduce")
    if _checking and gang.size > 1:
        _kinds_everywhere(own, gang, "reduce")
    return with_tensors(tensor, [_reduce_one(part, reduction, scale, gang) for part in own])


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: int | float = 0,
    pad_first: bool = False,
    *,
    gang: Gang | None = None,
) -> Any:
    """The same nest with axis `dim` of each tensor lengthened to that of the longest on any process.

    Args:
        dim: the axis; tensors that lack it stay as they are, and nested ones with a CannotPadNestedTensorWarning.
        pad_index: what fills the new places.
        pad_first: put them before the old ones.
    """
    gang = gang or current()
    own = tensors_of(tensor, "pad_across_processes")
    if any(part.is_nested for part in own):
        warnings.warn(
            "pad_across_processes leaves a nested tensor as it is: its rows have lengths of their own",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
    if gang.size == 1:
        return tensor
    kinds = _kinds_everywhere(own, gang, "pad_across_processes", free_axis=None)
    padded = []
    for index, part in enumerate(own):
        shapes = [kind[index][1] for kind in kinds]
        padded.append(
            _pad_one(part, dim, [s[dim] for s in shapes if _has_axis(s, dim)], pad_index, pad_first)
        )
    return with_tensors(tensor, padded)


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """A tensor that one process has, on every process's own device. The others call with None. Raises DataError if no
    process has one, or several have.
    """
    gang = current()
    kinds = gang.gather_objects(None if tensor is None else [*_kind(tensor), tensor.device.type])
    owners = [rank for rank, kind in enumerate(kinds) if kind is not None]
    if len(owners) != 1:
        raise DataError(
            f"copy_tensor_to_devices copies one process's tensor; {len(owners)} processes gave one"
        )
    if tensor is None:
        dtype, shape, device = kinds[owners[0]]
        place = choose_device(use_cpu=device == "cpu", local_rank=gang.world.local_rank)
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=place)
    copied: Tensor = broadcast(tensor, owners[0], gang=gang)
    return copied


def _refuse_parts(tensors: Sequence[Tensor], operation: str) -> None:
    """Refuse a tensor of which each process holds a part, as the parameters of a sharded model and their norms."""
    if any(map(is_in_parts, tensors)):
        raise DataError(
            f"{operation} takes whole tensors, and one is divided among the processes: pass its full_tensor()"
        )


def _check_source(operation: str, process: int, gang: Gang) -> None:
    if not 0 <= process < gang.size:
        raise DataError(f"{operation}: there is no process {process}; there are {gang.size}, counted from 0")


def _group(tensor: Tensor, gang: Gang) -> Any:
    """The process group of these ranks that carries this tensor: the host's for host memory, else the device's."""
    return gang.host_group if tensor.device.type == "cpu" else gang.device_group


def _at_least_a_vector(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _kind(tensor: Tensor) -> Kind:
    # The rows of a nested tensor have lengths of their own: it has no single shape.
    return dtype_name(tensor.dtype), [] if tensor.is_nested else list(tensor.shape)


def _kinds_everywhere(
    own: Sequence[Tensor], gang: Gang, operation: str, free_axis: int | None = -1
) -> list[list[Kind]]:
    """Types and shapes of every process's tensors, in rank order, checked to fit together.

    `free_axis` may differ between processes: 0 is the first, None allows any axis, and -1 none.
    """
    kinds: list[list[Kind]] = gang.gather_objects([_kind(tensor) for tensor in own])
    comparable = [[_comparable(kind, free_axis) for kind in part] for part in kinds]
    if any(part != comparable[0] for part in comparable):
        lines = "".join(f"\n  - process {rank}: {_described(part)}" for rank, part in enumerate(kinds))
        raise DistributedOperationException(
            f"{operation} was called with tensors that do not fit together:{lines}\n"
            "pad_across_processes makes shapes equal along one axis"
        )
    return kinds


def _comparable(kind: Kind, free_axis: int | None) -> tuple[str, tuple[int, ...] | int]:
    dtype, shape = kind
    if free_axis is None:
        return dtype, len(shape)
    return dtype, tuple(shape[1:]) if free_axis == 0 else tuple(shape)


def _described(kinds: Sequence[Kind]) -> str:
    return ", ".join(f"{dtype} of shape {shape}" for dtype, shape in kinds) or "no tensors"


def _gather_one(tensor: Tensor, kinds: Sequence[Kind], gang: Gang) -> Tensor:
    """Tensors travel as bytes of equal number: every type does, and lengths may differ."""
    rows = [shape[0] for _, shape in kinds]
    if not sum(rows):
        return tensor
    row_bytes = tensor.dtype.itemsize * int(torch.Size(tensor.shape[1:]).numel())
    sent = tensor.new_zeros(max(rows) * row_bytes, dtype=torch.uint8)
    sent[: tensor.shape[0] * row_bytes] = bits_of(tensor)
    received = [torch.empty_like(sent) for _ in rows]
    with waiting("gather tensors"):
        dist.all_gather(received, sent, group=_group(tensor, gang))
    parts = [
        got[: count * row_bytes].view(tensor.dtype).reshape(count, *tensor.shape[1:])
        for got, count in zip(received, rows, strict=True)
    ]
    return torch.cat(parts)


def _reduce_one(tensor: Tensor, reduction: str, scale: float, gang: Gang) -> Tensor:
    # A copy: backends reduce in place.
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    if reduction == "mean" and not (whole.is_floating_point() or whole.is_complex()):
        raise DataError(
            f"reduce: there is no mean of {whole.dtype} over processes; reduce its sum, or .float()"
        )
    if gang.size > 1:
        sent = whole.to(_SENT_AS.get(whole.dtype, whole.dtype))
        with waiting("reduce tensors"):
            dist.all_reduce(sent, _REDUCTIONS[reduction], group=_group(tensor, gang))
        whole = (sent / gang.size if reduction == "mean" else sent).to(whole.dtype)
    return whole if scale == 1.0 else whole * scale


def _has_axis(shape: Sequence[int], dim: int) -> bool:
    return -len(shape) <= dim < len(shape)


def _pad_one(tensor: Tensor, dim: int, sizes: list[int], filler: int | float, first: bool) -> Tensor:
    if tensor.is_nested or not _has_axis(tensor.shape, dim) or max(sizes) == tensor.shape[dim]:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = max(sizes) - tensor.shape[dim]
    gap = tensor.new_full(shape, filler)
    return torch.cat([gap, tensor] if first else [tensor, gap], dim=dim)
