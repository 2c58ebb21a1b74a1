"""One rank of a job whose meshes are compared with accelerate's."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import ParallelismConfig as Peer

from windlass.config.plugin_parallelism import ParallelismConfig


def axes(mesh: Any, names: list[str]) -> dict[str, list[int]]:
    return {name: mesh[name].mesh.tolist() for name in names}


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[1]}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    for sizes, joint in (
        ({"dp_shard_size": 2}, ["dp", "dp_cp", "dp_shard_cp"]),
        ({"dp_replicate_size": 2}, ["dp", "dp_cp"]),
        ({"tp_size": 2}, []),
        ({"cp_size": 2}, ["dp_cp", "dp_shard_cp"]),
    ):
        ours, theirs = ParallelismConfig(**sizes), Peer(**sizes)  # type: ignore[arg-type]
        mesh, peer = ours.get_device_mesh("cpu"), theirs.get_device_mesh("cpu")
        assert mesh.mesh_dim_names == peer.mesh_dim_names
        names = [*mesh.mesh_dim_names, *joint]
        assert axes(mesh, names) == axes(peer, names)
        assert ours.get_device_mesh() is ours.get_device_mesh("cpu") is mesh
    assert ParallelismConfig().build_device_mesh("cpu") is None
    assert ParallelismConfig(sp_size=2).build_device_mesh("cpu") is None
    dist.destroy_process_group()
    print("the meshes are right")


if __name__ == "__main__":
    main()
