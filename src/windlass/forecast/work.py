"""What an operation costs: products that it computes, bytes that it reads and writes, and bytes that it sends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from windlass.core.tensors import is_fake
from windlass.core.trees import tensors_in


class Work(NamedTuple):
    """One kernel: floating-point operations in a dtype, and bytes of memory that it reads and writes."""

    dtype: str
    flops: int
    nbytes: int


class Sent(NamedTuple):
    """One collective: its name, the ranks that take part, and the bytes that each of them sends."""

    name: str
    ranks: tuple[int, ...]
    nbytes: int


_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def work_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any, outputs: Sequence[Tensor]
) -> Work | None:
    """The work of an operation; None for one that computes nothing, as a view."""
    if not outputs or _is_view(func):
        return None
    given = list(tensors_in((args, kwargs)))
    # The rate of a device is that of the dtype of what is multiplied.
    first = next((t for t in (*given, *outputs) if t.is_floating_point()), None)
    nbytes = sum(t.numel() * t.element_size() for t in (*given, *outputs))
    count = _flops(func)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=found))
    return Work("" if first is None else _DTYPES.get(first.dtype, "fp32"), flops, nbytes)


def _is_view(func: Any) -> bool:
    return all(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns)


def _flops(func: Any) -> Callable[..., int] | None:
    name = func._overloadpacket
    if name is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention
    if name is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_backward
    if name is torch.ops.aten._grouped_mm:
        return _grouped
    return flop_registry.get(name)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # A key or value that several heads share counts for each: torch before 2.13 has no count of fewer heads.
    shapes = ((*states.shape[:1], query.shape[1], *states.shape[2:]) for states in (query, key, value))
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    # The scores are computed again, and four products follow.
    return _attention(query, key, value) * 5 // 2


def _grouped(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    # If the groups divide the columns of `other`, each column is multiplied with one of the matrices only.
    rows = one.numel() // (len(one) if (one.ndim, other.ndim) == (3, 2) else 1)
    return 2 * rows * other.shape[-1]


def grouped_product(
    one: Tensor, other: Tensor, offsets: Tensor | None = None, *_: Any, **more: Any
) -> Tensor:
    """The result of `_grouped_mm` without memory, in any dtype: PyTorch's own function for such tensors takes bfloat16
    alone. A matrix on both sides is divided along what is summed, and `offsets` has an end for each part.
    """
    groups = () if offsets is None else (len(offsets),)
    shape = {
        (2, 2): (*groups, len(one), other.shape[-1]),
        (2, 3): (len(one), other.shape[-1]),
        (3, 2): (one.shape[1], other.shape[-1]),
        (3, 3): (*one.shape[:2], other.shape[-1]),
    }[one.ndim, other.ndim]
    without = one if is_fake(one) else other
    return torch.ops.aten.new_empty.default(without, shape, dtype=more.get("out_dtype") or one.dtype)  # type: ignore[no-any-return]


# --- collectives ------------------------------------------------------------------------------------------------------

# What a rank sends of the larger side of a ring, in `n` ranks (Thakur et al. 2005, "Optimization of Collective
# Communication Operations in MPICH"): all but its own part, and for a sum that everybody gets, twice. Names are without
# the underscores around them.
_PARTS: dict[str, float] = {
    "allgather": 1.0,
    "allgather_base": 1.0,
    "allgather_into_tensor_coalesced": 1.0,
    "reduce_scatter": 1.0,
    "reduce_scatter_base": 1.0,
    "reduce_scatter_tensor_coalesced": 1.0,
    "send": 1.0,
    "alltoall": 1.0,
    "alltoall_base": 1.0,
    "allreduce": 2.0,
    "allreduce_coalesced": 2.0,
    "all_gather_into_tensor": 1.0,
    "reduce_scatter_tensor": 1.0,
    "all_to_all_single": 1.0,
    "all_reduce": 2.0,
}


def sent_by(func: Any, args: Sequence[Any]) -> Sent | None:
    """What a rank sends in a collective; None for any other operation, and for one in a group of one."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._overloadpacket.__name__.strip("_")
    share, ranks = _PARTS.get(name), _ranks(args)
    if share is None or ranks is None or len(ranks) == 1:
        return None
    # An argument may be a list of several tensors, which are sent together, or which are the parts of a whole one.
    whole = max(sum(t.numel() * t.element_size() for t in tensors_in(given)) for given in args)
    if name == "send":
        return Sent("send", ranks, whole)
    if name == "all_gather_into_tensor":  # its argument is a part, and not the whole
        whole *= len(ranks)
    return Sent(_shown(name), ranks, int(whole * share * (len(ranks) - 1) / len(ranks)))


def _shown(name: str) -> str:
    for part, shown in (("scatter", "reduce-scatter"), ("reduce", "all-reduce"), ("gather", "all-gather")):
        if part in name:
            return shown
    return "all-to-all"


def _ranks(args: Sequence[Any]) -> tuple[int, ...] | None:
    for value in args:
        # Operations of c10d get the group itself, functional collectives its name as their last text.
        if isinstance(value, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(value)
            except RuntimeError:
                continue
            return tuple(dist.get_process_group_ranks(group))
    for value in reversed(args):
        if isinstance(value, str):
            with contextlib.suppress(ValueError, LookupError, RuntimeError):
                named: Any = distributed_c10d._resolve_process_group(value)  # type: ignore[attr-defined, arg-type]
                return tuple(dist.get_process_group_ranks(named))
    return None
