"""The process groups of a job: shared, apart where ranks are, and opened within the timeout of the run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.dist.launch import on_ranks

from windlass.core.mesh import Mesh
from windlass.core.world import world_from_environment
from windlass.dist.device_mesh import fsdp_device_meshes, loss_device_mesh, tensor_device_mesh
from windlass.dist.gang import join, leave

CPU = torch.device("cpu")


@pytest.mark.dist
def test_a_mesh_of_views_has_their_groups() -> None:
    on_ranks(4, shared)


@pytest.mark.dist
def test_each_stage_has_groups_of_its_machines() -> None:
    on_ranks(8, machines)


@pytest.mark.dist
def test_a_group_that_a_rank_does_not_open_is_not_waited_for_longer_than_the_run_allows(
    tmp_path: Path,
) -> None:
    """Within the limit of this test: by default PyTorch waits for 30 minutes."""
    on_ranks(4, absent, tmp_path, timeout=120)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def shared() -> None:
    gang = join(world_from_environment(), CPU, 60, mesh=Mesh(shard=2, tensor=2))
    loss, tensor = fsdp_device_meshes(gang.mesh, CPU)
    assert tensor is not None
    assert loss.get_group() is gang.over("loss").device_group
    assert tensor.get_group() is gang.over("tensor").device_group
    assert tensor_device_mesh(gang.mesh, CPU)["tensor"].get_group() is tensor.get_group()
    assert gang.group_of([range(4)]) is dist.group.WORLD is gang.device_group
    gang.barrier()  # a rank that ended now would break the connections that others are opening
    leave()


def machines() -> None:
    """Two stages, each on two machines of two ranks."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    stage = join(world_from_environment(), CPU, 60, mesh=Mesh(pipeline=2, replicate=4)).over("stage")
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=stage.machine_group())
    assert total == rank // 2 * 4 + 1
    leave()


def absent(folder: Path) -> None:
    gang = join(world_from_environment(), CPU, 5)
    if gang.rank == 3:
        while len(list(folder.iterdir())) < 3:
            time.sleep(0.1)
    else:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            loss_device_mesh(Mesh(replicate=4).with_replicas(2), CPU)
        (folder / str(gang.rank)).touch()
    leave()
