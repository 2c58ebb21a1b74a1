"""Parts of tensors on meshes of any size, without other processes: a fake group replaces them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from windlass.checkpoint.sharded import parts_of_rank
from windlass.core.world import World
from windlass.dist.gang import Gang
from windlass.dist.sharded import (
    Part,
    copies,
    copy_whole_,
    from_part,
    holders,
    is_sharded,
    local,
    locals_of,
    part,
    shard_like,
    whole,
    whole_on_first,
)

SHAPES = [(7, 2), (2, 3), (1,), (6,), (0, 4), (3, 5, 2)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def on_every_rank(axes: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    """This process as each rank of a mesh in turn."""
    world = torch.Size(axes).numel()
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield rank, init_device_mesh("cpu", axes)
        finally:
            dist.destroy_process_group()


def held(tensor: torch.Tensor, index: int, ranks: int, dim: int) -> torch.Tensor:
    """What rank `index` of `ranks` holds, as PyTorch cuts it."""
    chunks = tensor.chunk(ranks, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, tensor.shape[dim], 0)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_cut_as_pytorch_cuts_them(dim: int) -> None:
    for rank, mesh in on_every_rank((5,)):
        for shape in SHAPES:
            if dim >= len(shape):
                continue
            tensor = numbered(shape)
            mine = held(tensor, rank, 5, dim)
            like = spread(mine, mesh, [Shard(dim)], tensor)
            assert torch.equal(part(like).of(tensor), mine)
            assert torch.equal(local(shard_like(tensor.half(), like)), mine.half())
            copy_whole_(like, tensor + 1)
            assert torch.equal(local(like), mine + 1)
            assert copies(like) == 1
            assert sum(torch.Size(found.sizes).numel() for _, found in holders(like)) == tensor.numel()


@pytest.mark.parametrize(("shape", "dim"), [((24, 2), 0), ((23, 2), 0), ((8, 6), 1), ((7, 4), 1)])
def test_the_part_of_a_tensor_gang_is_cut_again_by_shards(shape: tuple[int, ...], dim: int) -> None:
    """As FSDP2 does it: on a mesh of 3 shards and a gang of 2, which was cut first."""
    entries = []
    for rank, mesh in on_every_rank((3, 2)):
        whole_one = numbered(shape)
        expected = held(held(whole_one, rank % 2, 2, dim), rank // 2, 3, 0)
        first = _StridedShard(0, split_factor=2) if dim == 0 else Shard(0)
        tensor = DTensor.from_local(
            expected,
            mesh,
            [first, Shard(dim)],
            run_check=False,
            shape=whole_one.shape,
            stride=whole_one.stride(),
        )
        assert torch.equal(part(tensor).of(whole_one), expected), (shape, rank)
        assert copies(tensor) == 1
        assert torch.equal(local(shard_like(whole_one, tensor)), expected)
        entries.append(sorted((held.offsets, held.sizes) for _, held in holders(tensor)))
    assert all(entry == entries[0] for entry in entries)
    assert sum(torch.Size(sizes).numel() for _, sizes in entries[0]) == torch.Size(shape).numel()


def test_a_strided_shard_that_is_not_the_last_cut_is_refused() -> None:
    for _, mesh in on_every_rank((2, 2)):
        placements = [_StridedShard(0, split_factor=4), Shard(0)]
        tensor = DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False)
        with pytest.raises(ValueError, match="can be neither cut nor put together"):
            part(tensor)


def test_copies_are_held_by_several_and_named_once() -> None:
    for rank, mesh in on_every_rank((2, 3)):
        tensor = numbered((7, 2))
        like = spread(held(tensor, rank % 3, 3, 0), mesh, [Replicate(), Shard(0)], tensor)
        assert torch.equal(part(like).of(tensor), local(like))
        assert copies(like) == 2
        assert holders(like) == [
            (0, Part((0, 0), (3, 2))),
            (1, Part((3, 0), (3, 2))),
            (2, Part((6, 0), (1, 2))),
        ]


def test_copies_are_written_by_who_has_least_to_write() -> None:
    said = []
    for rank, mesh in on_every_rank((2, 3)):
        tensors = {}
        for name, shape in {"a": (7, 2), "b": (6, 4), "c": (3, 2), "d": (9, 4)}.items():
            tensor = numbered(shape)
            tensors[name] = spread(held(tensor, rank % 3, 3, 0), mesh, [Replicate(), Shard(0)], tensor)
        mine = parts_of_rank("model", {**tensors, "plain": torch.ones(2)}, Gang(World(rank, 6, rank, 6)))
        assert ("plain" in mine.tensors) == (rank == 0), "plain tensors may differ between ranks"
        said.append((set(mine.tensors), sum(t.numel() for t in mine.tensors.values())))
        if mine.index is not None:
            index = mine.index["tensors"]
    for name, entry in index.items():
        assert {writer for writer, _, _ in entry["parts"]} == {r for r in range(6) if name in said[r][0]}
    for place in range(3):
        first, second = said[place][1], said[place + 3][1]
        assert min(first, second) > 0.5 * max(first, second), "copies share the work"


def test_sums_that_are_not_made_yet_are_refused() -> None:
    for _, mesh in on_every_rank((2,)):
        pending = spread(numbered((4,)), mesh, [Partial()], numbered((4,)))
        for ask in (part, copies, holders, whole):
            with pytest.raises(ValueError, match="can be neither cut nor put together"):
                ask(pending)


def test_plain_tensors_are_whole() -> None:
    tensor = numbered((3, 2))
    assert not is_sharded(tensor)
    assert local(tensor) is whole(tensor) is whole_on_first(tensor) is locals_of([tensor])[0] is tensor
    assert (copies(tensor), holders(tensor)) == (1, [(0, Part((0, 0), (3, 2)))])
    target = torch.zeros(3, 2, dtype=torch.float64)
    copy_whole_(target, tensor)
    assert torch.equal(target, tensor.double())
    assert torch.equal(shard_like(tensor, target), tensor)
    with pytest.raises(ValueError, match=r"shape \[3, 2\] cannot fill one of \[2, 3\]"):
        copy_whole_(torch.zeros(2, 3), tensor)


def spread(mine: torch.Tensor, mesh: Any, placements: list[Any], whole: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        mine.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def test_parts_on_the_host_stay_there_on_a_mesh_of_devices() -> None:
    """FSDP2 keeps offloaded parameters on the host; DTensor would move a part to the devices of its mesh."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = DeviceMesh("cuda", [0, 1], _init_backend=False)
        anywhere = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)], run_check=False)
        like = torch.empty_like(anywhere, device="cpu")
        mine = torch.ones(2, 3, dtype=torch.bfloat16)
        found = from_part(mine, like)
        assert (local(found).device.type, found.dtype, found.shape) == ("cpu", torch.bfloat16, (4, 3))
        assert torch.equal(local(found), mine)
        assert not found.requires_grad
    finally:
        dist.destroy_process_group()
