"""PyTorch's `DeviceMesh` of the ranks over which a model is sharded or divided."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.core.device import backend_for
from windlass.core.mesh import AXES, VIEWS, Axis, Mesh
from windlass.dist.gang import current, leave
from windlass.dist.listening import gloo_on_loopback


def loss_device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The ranks of this rank's loss view: on one axis, "shard", or with several replicas on two, "replicate" and
    "shard", where consecutive ranks share one copy of the model. Ranks that divide sequences have shards too.
    Collective.
    """
    return fsdp_device_meshes(mesh, device)[0]


def fsdp_device_meshes(mesh: Mesh, device: torch.device) -> tuple[DeviceMesh, DeviceMesh | None]:
    """`loss_device_mesh`, and that of this rank's tensor view, both of one mesh as FSDP2 needs them; None for a rank
    that computes whole layers. Collective.
    """
    if not dist.is_initialized():
        open_group_of_one(device)
    if device.index is not None:
        # Collectives of a mesh run on the current device of its type.
        torch.accelerator.set_device_index(device.index)
    sizes = {axis: mesh.along(axis) for axis in AXES if axis not in VIEWS["context"]}
    sizes["shard"] *= mesh.size("context") * sizes.pop("expert")
    axes = [axis for axis, size in sizes.items() if axis == "shard" or size > 1]
    whole = _whole_mesh(torch.arange(mesh.size()).reshape([sizes[axis] for axis in axes]), axes, device)
    loss = tuple(axis for axis in axes if axis in VIEWS["loss"])
    tensor = whole["tensor"] if "tensor" in axes else None
    return whole if len(loss) == len(axes) else whole[loss], tensor


def tensor_device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The ranks of this rank's stage view: the last axis, "tensor", is that of its tensor view; along the first,
    "loss", if there is one, ranks have the same parts. Collective.
    """
    sizes = {"pipeline": mesh.pipeline, "loss": mesh.size("loss"), "tensor": mesh.tensor}
    axes = [axis for axis in sizes if axis == "tensor" or sizes[axis] > 1]
    whole = _whole_mesh(torch.arange(mesh.size()).reshape([sizes[axis] for axis in axes]), axes, device)
    return whole[tuple(axes[1:])] if axes[0] == "pipeline" else whole


def expert_device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The ranks of this rank's stage view: along "tensor", if there is such an axis, and "expert" they have different
    experts; along the first, "copies", if there is one, the same. Collective.
    """
    outer = VIEWS["data"][: VIEWS["data"].index("expert")]
    groups: dict[str, tuple[Axis, ...]] = {
        "pipeline": ("pipeline",),
        "outer": outer,
        "expert": ("expert",),
        "inner": VIEWS["context"],
        "tensor": ("tensor",),
    }
    sizes = {name: math.prod(map(mesh.along, axes)) for name, axes in groups.items()}
    # Experts are divided among the ranks of a tensor gang first: a rank finds the tokens of its own in one stretch.
    order = ("pipeline", "outer", "inner", "tensor", "expert")
    ranks = (
        torch.arange(mesh.size()).view(*sizes.values()).permute(*(list(sizes).index(name) for name in order))
    )
    copies = sizes["outer"] * sizes["inner"]
    named = {"pipeline": mesh.pipeline, "copies": copies, "tensor": mesh.tensor, "expert": mesh.expert}
    axes = [axis for axis in named if axis == "expert" or named[axis] > 1]
    whole = _whole_mesh(ranks.reshape([named[axis] for axis in axes]), axes, device)
    return whole[tuple(axes[1:])] if axes[0] == "pipeline" else whole


def _whole_mesh(ranks: Tensor, axes: Sequence[str], device: torch.device) -> DeviceMesh:
    """The mesh of all ranks of the job, whose axis number i goes along dimension i of `ranks`. Its groups are those of
    the gangs, where they have the same ranks, and wait as long as theirs. Collective.
    """
    gang = current()
    groups = [
        gang.group_of(ranks.movedim(dim, -1).reshape(-1, size).tolist())
        for dim, size in enumerate(ranks.shape)
    ]
    return DeviceMesh.from_group(groups, device.type, ranks.contiguous(), mesh_dim_names=tuple(axes))


def part_along(whole: nn.Parameter, mesh: DeviceMesh, dim: int, *axes: str) -> nn.Parameter:
    """A copy of this rank's chunk of `whole` along `dim`, which is cut along each of these axes of `mesh` that it has,
    in its order; along the other axes ranks have the same. No communication.
    """
    # Here, because importing it takes 0.3 seconds, and not every process that has a mesh divides parameters.
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    chunk, placements = whole.detach(), list[Placement]()
    for number, axis in enumerate(mesh.mesh_dim_names or ()):
        cut = axis in axes
        placements.append(Shard(dim) if cut else Replicate())
        if cut:
            chunk = chunk.chunk(mesh.size(number), dim)[mesh.get_local_rank(number)]
    part = DTensor.from_local(
        chunk.clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return nn.Parameter(part, whole.requires_grad)


def open_group_of_one(device: torch.device) -> None:
    """A mesh of one rank needs a process group too; its store is in this process, so no port is opened."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with gloo_on_loopback():
        dist.init_process_group(backend_for(device), store=store, rank=0, world_size=1)
    atexit.register(leave)


def export_local_rank(rank: int) -> None:
    """Set the variable that launchers set, which DeepSpeed reads also in a process that none started."""
    os.environ.setdefault("LOCAL_RANK", str(rank))
