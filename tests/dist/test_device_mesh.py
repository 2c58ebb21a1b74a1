"""The gangs of a mesh on which two neighbours compute one model, and PyTorch's mesh of their loss view."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from tests.dist.launch import on_ranks
from torch.distributed.tensor import distribute_tensor

from windlass.core.errors import ConfigError
from windlass.core.mesh import Mesh, View
from windlass.core.world import world_from_environment
from windlass.dist.device_mesh import loss_device_mesh
from windlass.dist.gang import Gang, join, leave


@pytest.mark.dist
def test_views_of_a_mesh_are_gangs_of_their_own() -> None:
    on_ranks(4, main)


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK, CPU = int(os.environ.get("RANK", "0")), torch.device("cpu")
EVEN, LEFT = RANK % 2, RANK // 2 * 2
MEMBERS: dict[View, tuple[int, ...]] = {
    "data": (EVEN, EVEN + 2), "loss": (EVEN, EVEN + 2), "context": (RANK,), "model": (LEFT, LEFT + 1),
    "all": (0, 1, 2, 3),
}  # fmt: skip


def exchanges(gang: Gang, members: tuple[int, ...]) -> None:
    """Every exchange reaches the members, in order, and no other rank."""
    assert (gang.members, gang.size, gang.rank) == (members, len(members), members.index(RANK))
    assert gang.world.rank == RANK, "the process is the same"
    total = float(sum(members))
    assert gang.sum(torch.tensor(float(RANK))) == total
    assert gang.sum_on_device(torch.tensor(float(RANK))) == total
    assert gang.start_sum([float(RANK), 1.0]).wait() == [total, len(members)]
    assert gang.gather_objects(RANK) == list(members)
    assert [gang.broadcast_object(RANK, source) for source in range(gang.size)] == list(members)
    received = {rank: tensor.item() for rank, _, tensor in gang.stream([torch.tensor(float(RANK))])}
    assert received == dict(enumerate(map(float, members)))
    assert gang.vote(True)
    assert gang.vote(RANK != 3) == (3 not in members), "a no is heard by the members alone"
    gang.barrier()


def views(gang: Gang) -> None:
    for view, members in MEMBERS.items():
        exchanges(gang.over(view), members)
        for other in MEMBERS:
            assert gang.over(view).over(other) is gang.over(other), "made once"
        if len(members) > 1:
            assert copy.deepcopy(gang.over(view)) is gang.over(view)
            assert pickle.loads(pickle.dumps(gang.over(view))) is gang.over(view)
    assert gang.over("all") is gang
    assert gang.over("data") is gang.over("loss")
    # An exchange of some ranks may be under way while others make one of another view.
    pending = gang.over("data").start_sum([1.0])
    assert gang.over("model").start_sum([1.0]).wait() == pending.wait() == [2.0]


def torch_meshes(gang: Gang) -> None:
    flat = loss_device_mesh(gang.mesh.with_replicas(1), CPU)
    assert flat.mesh_dim_names == ("shard",)
    assert flat.mesh.tolist() == list(MEMBERS["data"])
    mesh = loss_device_mesh(gang.mesh.with_replicas(2), CPU)
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert mesh.mesh.tolist() == [[rank] for rank in MEMBERS["data"]]
    whole = distribute_tensor(torch.arange(4.0), flat).full_tensor()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]


def refusals() -> None:
    for mesh in (Mesh(replicate=4), Mesh(replicate=2, context=2)):
        with pytest.raises(ConfigError, match="use one layout in a script"):
            join(world_from_environment(), CPU, 60, mesh=mesh)


def shards_of_contexts() -> None:
    mesh = loss_device_mesh(Mesh(replicate=1, shard=2, context=2), CPU)
    assert (mesh.mesh_dim_names, mesh.mesh.tolist()) == (("shard",), [0, 1, 2, 3])
    mesh = loss_device_mesh(Mesh(replicate=2, context=2), CPU)
    assert (mesh.mesh_dim_names, mesh.mesh.tolist()) == (("replicate", "shard"), [[0, 1], [2, 3]])


def main() -> None:
    world = world_from_environment()
    plain = join(world, CPU, 60)
    gang = join(world, CPU, 60, mesh=Mesh(replicate=2, tensor=2))
    assert gang is plain, "a job that has met without a layout gets one"
    assert join(world, CPU, 60, mesh=Mesh(shard=2, tensor=2)) is gang, "the same groups"
    views(gang)
    torch_meshes(gang)
    shards_of_contexts()
    refusals()
    gang.barrier()
    leave()
