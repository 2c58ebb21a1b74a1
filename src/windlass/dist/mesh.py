"""The ranks of a job as a named mesh: `shard` splits tensors, `replicate` keeps copies of the split ones."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.core.device import backend_for
from windlass.core.errors import ConfigError, Problem
from windlass.dist.gang import Gang, leave
from windlass.dist.listening import gloo_on_loopback

REPLICATE, SHARD = "replicate", "shard"


def data_mesh(device: torch.device, gang: Gang, replicas: int = 1) -> DeviceMesh:
    """All ranks on one axis, or, with several replicas, on two: neighbours share one copy of the model.

    Raises:
        ConfigError: the ranks do not divide into so many replicas.
    """
    if replicas < 1 or gang.size % replicas:
        fix = f"must divide the number of processes, {gang.size}"
        raise ConfigError(Problem("dp_replicate_size", replicas, fix))
    if not dist.is_initialized():
        open_group_of_one(device)
    if device.index is not None:
        # Collectives of a mesh run on the current device of its type.
        torch.accelerator.set_device_index(device.index)
    if replicas == 1:
        return init_device_mesh(device.type, (gang.size,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device.type, (replicas, gang.size // replicas), mesh_dim_names=(REPLICATE, SHARD))


def open_group_of_one(device: torch.device) -> None:
    """A mesh of one rank needs a process group too; its store is in this process, so no port is opened."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with gloo_on_loopback():
        dist.init_process_group(backend_for(device), store=store, rank=0, world_size=1)
    atexit.register(leave)


def export_local_rank(rank: int) -> None:
    """Set the variable that launchers set, which DeepSpeed reads also in a process that none started."""
    os.environ.setdefault("LOCAL_RANK", str(rank))
