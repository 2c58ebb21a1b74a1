"""Tensors of which each rank holds a part, and the plain ones beside them, through one set of functions.

A sharded tensor is a `DTensor`: split over some axes of a device mesh, the same on the others. For a plain tensor
every function here is the identity, so that code that saves, loads or measures need not know which it has.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, Problem
from windlass.dist.ending import exchanging
from windlass.dist.flat import FlatParts, InParts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T", bound=Tensor)


class Absent(nn.Parameter):
    """The shape, dtype and device of a parameter that another rank holds, in the memory of one element.

    It never has a gradient, and writing to it is an error.
    """


def absent_like(parameter: nn.Parameter, device: torch.device) -> Absent:
    """Stand-in for `parameter` on a rank that does not hold it."""
    one = torch.zeros((), dtype=parameter.dtype, device=device)
    return Absent(one.expand(parameter.shape), parameter.requires_grad)


def present(parameters: Iterable[T]) -> list[T]:
    """The parameters that this rank holds, or holds a part of."""
    return [parameter for parameter in parameters if not isinstance(parameter, Absent)]


@dataclass(frozen=True, slots=True)
class Part:
    """Where a rank's part lies in the whole tensor: its first index and its length along every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """This part of `whole`, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole

    def common(self, other: Part) -> Part | None:
        """What this part and another one of the same tensor have in common; None if that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes))
        sizes = tuple(map(sub, ends, offsets))
        return Part(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Part) -> Part:
        """This part, counted from the first index of another one that it lies in."""
        return Part(tuple(map(sub, self.offsets, outer.offsets)), self.sizes)


Blocks = Sequence[tuple[Part, Sequence[int]]]
"""The parts of a tensor, each with the ranks of the job that hold it."""


def blocks_as_lists(blocks: Blocks) -> list[list[list[int]]]:
    """Blocks as ranks send them to each other: offsets, sizes and ranks of each."""
    return [[list(block.offsets), list(block.sizes), list(ranks)] for block, ranks in blocks]


def blocks_of_lists(lists: list[list[list[int]]]) -> Blocks:
    """The blocks of which `blocks_as_lists` made `lists`."""
    return [(Part(tuple(offsets), tuple(sizes)), ranks) for offsets, sizes, ranks in lists]


class Held(InParts):
    """A tensor that some ranks of the job hold, whole or in parts, and others not at all."""

    # What this rank holds: the tensor, or a sharded one with this rank's part; None if it holds nothing
    mine: Tensor | None
    blocks: Blocks  # the parts, with the ranks that write them

    @staticmethod
    def __new__(cls, like: Tensor, mine: Tensor | None, blocks: Blocks) -> Held:
        made: Held = Tensor._make_wrapper_subclass(
            cls, tuple(like.shape), dtype=like.dtype, device=like.device
        )
        made.mine, made.blocks = None if mine is None else mine.detach(), blocks
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Held(shape={list(self.shape)}, here={self.mine is not None})"

    @property
    def nothing(self) -> Tensor:
        """The part of a rank that holds nothing: no rows, and of a scalar memory that is not used."""
        return torch.empty((0, *self.shape[1:])[: self.dim()], dtype=self.dtype, device=self.device)

    def whole(self) -> Tensor:
        """The tensor, on every rank. Collective."""
        if self.mine is None:
            value = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        else:
            value = whole(self.mine).contiguous()
        if torch.distributed.is_initialized() and value.numel():
            torch.distributed.broadcast(value, self.blocks[0][1][0])
        return value


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Whether `tensor` is spread over a mesh (even one on which each rank happens to hold all of it)."""
    # If DTensor was not imported, no tensor is one. Importing it takes 0.3 seconds.
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part as a plain tensor, in the same memory."""
    if isinstance(tensor, FlatParts):
        return tensor.mine
    if isinstance(tensor, Held):
        return tensor.nothing if tensor.mine is None else local(tensor.mine)
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def is_packed(value: Any) -> bool:
    """Return True for a tensor that is made of others, sharded or not, such as averages in 8 bits."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return False
    inner = local(value)
    return type(inner) is not Tensor and hasattr(inner, "__tensor_flatten__") and not is_sharded(inner)


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`local` of each: for kernels over lists of tensors, which cost far less on plain ones."""
    library = sys.modules.get("torch.distributed.tensor")
    if library is None:
        return list(tensors)
    with torch.no_grad():  # once for all: entering it costs more than a tensor's part
        return [t.to_local() if isinstance(t, library.DTensor) else t for t in tensors]


def check_takes_parts(optimizer: torch.optim.Optimizer, field: str, value: str) -> None:
    """Check that `optimizer` can update the parameters that it has. Raises ConfigError if some are sharded, and the
    optimizer is one of bitsandbytes, whose kernels take plain tensors.
    """
    library = any(base.__module__.split(".")[0] == "bitsandbytes" for base in type(optimizer).__mro__)
    if library and any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        fix = "bitsandbytes cannot update sharded parameters: use adamw_torch_8bit (torchao), or replicate the model"
        raise ConfigError(Problem(field, value, fix))


def is_in_parts(tensor: Any) -> bool:
    """Return True if each rank holds a part of `tensor`: a block of a mesh, a run of elements, or all or nothing."""
    return is_sharded(tensor) or isinstance(tensor, InParts)


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor` on every rank, where the collectives of its mesh run. Collective for a sharded tensor."""
    if isinstance(tensor, FlatParts | Held):
        return tensor.whole()
    if not is_sharded(tensor):
        return tensor
    _check_placements(tensor)
    with torch.no_grad():
        placed = _on_mesh_device(tensor)
        return _joined(placed) if any(map(_is_strided, tensor.placements)) else placed.full_tensor()


def _joined(tensor: DTensor) -> Tensor:
    """All of a tensor that is cut along one dimension more than once: the cuts are undone one by one, the last first.
    PyTorch's `full_tensor` joins only such parts as are equally long.
    """
    mesh, mine = tensor.device_mesh, tensor.to_local()
    place = _place_in(tensor)
    for axis, dim, before in reversed(_cuts(tensor, place)):
        ranks = mesh.size(axis)
        chunk = -(-before // ranks)
        # `all_gather` takes parts of one length.
        padding = list(mine.shape)
        padding[dim] = chunk - mine.shape[dim]
        padded = torch.cat([mine, mine.new_zeros(padding)], dim).contiguous()
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        torch.distributed.all_gather(parts, padded, group=mesh.get_group(axis))
        mine = torch.cat(parts, dim).narrow(dim, 0, before)
    return mine.contiguous()


def whole_on_first(tensor: Tensor) -> Tensor | None:
    """All of a sharded tensor in host memory on rank 0, None on other ranks; a plain tensor as it is, everywhere.

    Collective for a sharded tensor.
    """
    if not is_sharded(tensor):
        return tensor
    with exchanging():
        gathered = whole(tensor)
        return gathered.cpu() if torch.distributed.get_rank() == 0 else None


def copies(tensor: Tensor) -> int:
    """How many ranks of the tensor's mesh hold each of its elements; 1 for a plain tensor."""
    if not is_sharded(tensor):
        return 1
    _check_placements(tensor)
    mesh = tensor.device_mesh
    count = 1
    for axis, placement in enumerate(tensor.placements):
        count *= 1 if _is_cut(placement) else mesh.size(axis)
    return count


def is_even(tensor: DTensor) -> bool:
    """Whether parts of one size make up the tensor, cut along its first dimension alone."""
    parts = tensor.device_mesh.size() // copies(tensor)
    return part(tensor).sizes[1:] == tuple(tensor.shape[1:]) and tensor.shape[0] % parts == 0


def copies_among(tensor: Tensor, ranks: int) -> int:
    """How many of `ranks` ranks hold each element of a tensor. Those outside of its mesh hold it on a mesh like it; a
    plain tensor all of them have.
    """
    return ranks // tensor.device_mesh.size() * copies(tensor) if is_sharded(tensor) else ranks


def sum_of_parts(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each of `values`, scalars that ranks computed from their part of the tensor at the same place in
    `tensors`, over all its parts. One collective for each mesh and dtype.
    """
    sums = list(values)
    meshes: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor):
            _check_placements(tensor)
            key = (tensor.device_mesh, tensor.placements, values[index].dtype)
            meshes.setdefault(key, []).append(index)
    for (mesh, placements, _), places in meshes.items():
        # Parameters that are offloaded lie on the host, where the groups of the mesh carry nothing.
        here = torch.stack([values[index] for index in places])
        total = here.to(mesh.device_type)
        for axis, placement in enumerate(placements):
            if _is_cut(placement):
                torch.distributed.all_reduce(total, group=mesh.get_group(axis))
        for index, value in zip(places, total.to(here.device).unbind(), strict=True):
            sums[index] = value
    return sums


def part(tensor: Tensor) -> Part:
    """Where this rank's part of `tensor` lies in the whole one."""
    if isinstance(tensor, Held):
        if tensor.mine is not None:
            return part(tensor.mine)
        return Part((0,) * tensor.dim(), tuple(tensor.nothing.shape))
    if not is_sharded(tensor):
        return Part((0,) * tensor.dim(), tuple(tensor.shape))
    _check_placements(tensor)
    return _part_at(tensor, _place_in(tensor))


def _place_in(tensor: DTensor) -> Sequence[int]:
    """This rank's position along each axis of the tensor's mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not part of the tensor's mesh, so it holds nothing of it")
    return coordinate


def holders(tensor: Tensor, preferred: Sequence[int] = (0,)) -> list[tuple[int, Part]]:
    """Every part of a sharded tensor with one of the ranks that hold it, parts without elements left out; of a plain
    tensor, which all hold, all of it.

    The same on every rank that prefers the same, without communication.

    Args:
        preferred: ranks to name where they hold a part; else it is the first rank that does. Of a plain tensor, the
            first of them.
    """
    if not is_sharded(tensor) and not isinstance(tensor, Held):
        return [(preferred[0], part(tensor))]
    return [
        (next((rank for rank in ranks if rank in preferred), ranks[0]), held)
        for held, ranks in all_holders(tensor)
    ]


def all_holders(tensor: DTensor | Held) -> Blocks:
    """Every part of a sharded tensor with all ranks that hold it, parts without elements left out; the blocks of a
    `Held`. The same on every rank, without communication.
    """
    if isinstance(tensor, Held):
        return tensor.blocks
    _check_placements(tensor)
    mesh = tensor.device_mesh
    found: dict[Part, list[int]] = {}
    for place in itertools.product(*(range(size) for size in mesh.shape)):
        found.setdefault(_part_at(tensor, place), []).append(int(mesh.mesh[place]))
    return [(held, ranks) for held, ranks in found.items() if all(held.sizes)]


def _part_at(tensor: DTensor, coordinate: Sequence[int]) -> Part:
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis, dim, before in _cuts(tensor, coordinate):
        # Chunks are as long as the first; the last ones may be shorter or empty.
        chunk = -(-before // tensor.device_mesh.size(axis))
        start = min(coordinate[axis] * chunk, before)
        offsets[dim] += start
        sizes[dim] = min(chunk, before - start)
    return Part(tuple(offsets), tuple(sizes))


def _cuts(tensor: DTensor, coordinate: Sequence[int]) -> list[tuple[int, int, int]]:
    """The cuts in the order in which they are made: the axis of the mesh, the dimension, and the length of what is cut
    there. A strided shard, which FSDP2 makes of the part of a tensor gang, is cut after the others.
    """
    cut = [axis for axis, placement in enumerate(tensor.placements) if _is_cut(placement)]
    sizes, found = list(tensor.shape), []
    for axis in sorted(cut, key=lambda axis: _is_strided(tensor.placements[axis])):
        dim: int = tensor.placements[axis].dim  # type: ignore[attr-defined]
        chunk = -(-sizes[dim] // tensor.device_mesh.size(axis))
        found.append((axis, dim, sizes[dim]))
        sizes[dim] = max(min(chunk, sizes[dim] - coordinate[axis] * chunk), 0)
    return found


def _is_cut(placement: Any) -> bool:
    return type(placement).__name__ in ("Shard", "_StridedShard")


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def copy_whole_(target: Tensor, source: Tensor) -> None:
    """Take this rank's part of the whole tensor `source` into `target`, in place. No communication. `source`: has
    `target`'s global shape; any device and dtype.
    """
    if target.shape != source.shape:
        raise ValueError(f"a tensor of shape {list(source.shape)} cannot fill one of {list(target.shape)}")
    with torch.no_grad():
        local(target).copy_(part(target).of(source))


def shard_like(source: Tensor, like: Tensor) -> Tensor:
    """A copy of the whole tensor `source`, spread as `like` is and where it lies, in `source`'s dtype.

    No communication.
    """
    mine = part(like).of(source)
    return from_part(mine.to(local(like).device, copy=True).contiguous(), like)


def _on_mesh_device(tensor: DTensor) -> DTensor:
    """`tensor` where the collectives of its mesh run: parameters that are offloaded lie on the host."""
    part_here, device_type = tensor.to_local(), tensor.device_mesh.device_type
    if part_here.device.type == device_type:
        return tensor
    return _spread_as(tensor, part_here.to(device_type))


def from_part(mine: Tensor, like: Tensor) -> Tensor:
    """The tensor of which this rank holds the part `mine`, spread as `like` is. No communication."""
    return _spread_as(like, mine) if is_sharded(like) else mine


def shard_flat(mine: Tensor, like: Tensor) -> Tensor:
    """The one-dimensional tensor that the parts `mine`, which have one length on all ranks, make up in the order of the
    parts of `like`, a tensor that is cut along its first dimension. No communication.
    """
    if not is_sharded(like):
        return mine
    parts = like.device_mesh.size() // copies(like)
    return type(like).from_local(
        mine,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size((mine.numel() * parts,)),
        stride=(1,),
    )


def _spread_as(like: DTensor, mine: Tensor) -> DTensor:
    if mine.device.type != like.device_mesh.device_type and local(like).device == mine.device:
        # What FSDP2 keeps on the host. `from_local` would move it to the device of the mesh.
        spread = cast("DTensor", torch.empty_like(like, dtype=mine.dtype, requires_grad=False))
        local(spread).copy_(mine)
        return spread
    return type(like).from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _check_placements(tensor: DTensor) -> None:
    for placement in tensor.placements:
        known = _is_cut(placement) or type(placement).__name__ == "Replicate"
        if not known or (_is_strided(placement) and not _follows_all(tensor, placement)):
            raise ValueError(f"tensors placed as {placement} can be neither cut nor put together here")


def _follows_all(tensor: DTensor, strided: Any) -> bool:
    """Whether this cut is made after all other cuts along its dimension."""
    others = [
        tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if type(placement).__name__ == "Shard" and placement.dim == strided.dim  # type: ignore[attr-defined]
    ]
    return bool(strided.split_factor == math.prod(others))
