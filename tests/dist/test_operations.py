"""Operations between processes; several processes in one launch, and a world of one here."""

from __future__ import annotations

import warnings
from collections import namedtuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate.utils as peer
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState as PeerState
from tests.dist.launch import on_ranks
from tests.dist.same import assert_same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from windlass.core.errors import ConfigError, DataError
from windlass.core.mesh import Mesh
from windlass.core.world import world_from_environment
from windlass.dist import operations
from windlass.dist import operations as ours
from windlass.dist.gang import current, join, leave
from windlass.dist.imagined import imagined_job
from windlass.dist.operations import _group
from windlass.utils.environment import clear_environment


@pytest.mark.dist
def test_three_processes_agree_with_accelerate() -> None:
    on_ranks(3, main)


def test_a_world_of_one_gives_back_what_it_was_given() -> None:
    nest = {"a": torch.ones(2, 3), "b": (torch.tensor(1.0),)}
    assert operations.gather(nest) is nest
    assert operations.broadcast(nest) is nest
    assert operations.pad_across_processes(nest, dim=1) is nest
    assert operations.gather_object("text") == "text"
    assert operations.broadcast_object_list([1, object]) == [1, object]


def test_a_nested_tensor_is_left_with_the_warning_of_the_peer_in_one_process_too() -> None:
    peer = pytest.importorskip("accelerate.utils")
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    for module in (operations, peer):
        with pytest.warns(module.CannotPadNestedTensorWarning) as caught:
            assert module.pad_across_processes({"a": nested})["a"] is nested
        assert [type(w.message) for w in caught] == [module.CannotPadNestedTensorWarning]


def test_a_world_of_one_reduces_into_a_new_tensor() -> None:
    value = torch.ones(2)
    reduced = operations.reduce({"a": value})["a"]
    assert torch.equal(reduced, value)
    assert reduced is not value
    with pytest.raises(ConfigError, match="none"):
        operations.reduce(value, "none")


def test_tensors_of_a_device_travel_among_the_ranks_of_their_gang() -> None:
    """Also where layers are divided, so that those are not all ranks of the job."""
    with imagined_job(4):
        gang = join(world_from_environment(), torch.device("cpu"), mesh=Mesh(replicate=2, tensor=2))
        group = _group(torch.empty(1, device="meta"), gang.over("data"))
        assert dist.get_process_group_ranks(group) == [0, 2]


# --- what each rank runs ----------------------------------------------------------------------------------------------


Pair = namedtuple("Pair", "left right")


def nest(rank: int) -> dict[str, Any]:
    base = torch.arange(6.0).reshape(2, 3) + 10 * rank
    return {
        "a": base,
        "b": [base.long(), (base[:, 0].bfloat16(),)],
        "c": Pair(base.bool(), torch.tensor(rank)),
    }


def as_the_peer_does(rank: int) -> None:
    for change in (ours.gather, ours.reduce, ours.broadcast, ours.pad_across_processes):
        data = (
            nest(rank)
            if change is not ours.reduce
            else {"a": nest(rank)["a"], "b": [torch.ones(2, 2) * rank]}
        )
        theirs = getattr(peer, change.__name__)(nest(rank) if change is not ours.reduce else data)
        assert_same(change(data), theirs)
    for reduction in ("sum", "max", "mean"):
        value = torch.tensor([1.0, -2.0]) * (rank + 1)
        assert_same(ours.reduce(value, reduction), peer.reduce(value, reduction))
    lengths = torch.ones(2, rank + 1)
    for options in ({"dim": 1}, {"dim": -1, "pad_index": 7}, {"dim": 1, "pad_first": True}, {"dim": 5}):
        assert_same(
            ours.pad_across_processes(lengths, **options), peer.pad_across_processes(lengths, **options)
        )
    items = [rank, f"r{rank}"]
    assert ours.gather_object(items) == peer.gather_object(items)
    assert_same(ours.broadcast(torch.tensor([rank]), from_process=2), torch.tensor([2]))
    assert (
        ours.broadcast_object_list([rank, "x"], 1) == peer.broadcast_object_list([rank, "x"], 1) == [1, "x"]
    )


def beyond_the_peer(rank: int) -> None:
    uneven = torch.full((rank, 2), rank, dtype=torch.int16)
    assert_same(ours.gather(uneven), torch.tensor([[1, 1], [2, 2], [2, 2]], dtype=torch.int16))
    assert ours.gather(torch.empty(0, 2)).shape == (0, 2)
    strided = torch.arange(12.0).reshape(3, 4).t()
    target = strided.clone() if rank == 1 else torch.zeros(3, 4).t()
    assert_same(ours.broadcast(target, from_process=1), strided)
    for kind in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64):
        mine = torch.tensor([1, 0, rank]).to(kind)
        assert_same(ours.reduce(mine, "sum"), torch.tensor([3, 0, 3]).to(kind))
        assert_same(ours.broadcast(mine, from_process=2), torch.tensor([1, 0, 2]).to(kind))
    assert int(ours.reduce(torch.tensor(True), "sum").sum()) == 1, (
        "a boolean that holds a 3 counts three times"
    )
    conjugate = torch.tensor([rank + 1j]).conj()
    assert_same(ours.broadcast(conjugate, from_process=1).resolve_conj(), torch.tensor([1 - 1j]))
    assert not ours.reduce(torch.ones(1, requires_grad=True)).requires_grad
    assert_same(ours.reduce(torch.ones(1), scale=2.0), torch.tensor([2.0]))
    assert_same(
        ours.copy_tensor_to_devices(torch.tensor([3, 4]) if rank == 2 else None), torch.tensor([3, 4])
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        assert ours.pad_across_processes(nested) is nested
    assert any(w.category is ours.CannotPadNestedTensorWarning for w in caught)


def values(rank: int) -> None:
    sent = {
        "tuple": (rank, [None, True]), "set": {1, 2}, "bytes": b"\x00\xff", "path": Path("a/b"), 7: "a number as a key",
        "$odd": float("inf"), "array": np.array([[1.5, rank]]), "scalar": np.float32(2.5),
        "tensor": torch.tensor([rank], dtype=torch.bfloat16), "empty": torch.empty(0, 3),
        "sets": {frozenset({1}), frozenset()},
    }  # fmt: skip
    everyone = ours.gather_object([sent])
    assert_same([part["tuple"][0] for part in everyone], [0, 1, 2])
    assert_same(everyone[rank], sent)


def refusals(rank: int) -> None:
    with pytest.raises(DataError, match=r"process 1: value\[0\]\['x'\] is a object"):
        ours.gather_object([{"x": object() if rank == 1 else 1}])
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(DataError, match="process 1: RecursionError"):
        ours.gather_object([deep if rank == 1 else 1])
    with pytest.raises(DataError, match=r"process 2: .*meta"):
        ours.gather_object([torch.empty(2, device="meta" if rank == 2 else "cpu")])
    with pytest.raises(DataError, match="no process 3"):
        ours.broadcast_object_list([1], 3)
    with pytest.raises(DataError, match="wrap it in a list"):
        ours.gather_object("text")
    shapes = r"process 0: float32 of shape \[1, 1\](.|\n)*process 2: float32 of shape \[1, 3\]"
    with pytest.raises(ours.DistributedOperationException, match=shapes):
        ours.gather(torch.ones(1, rank + 1))
    with pytest.raises(ours.DistributedOperationException, match="process 1: float64"):
        ours.gather(torch.ones(1, dtype=torch.float64 if rank == 1 else torch.float32))
    with pytest.raises(ConfigError, match="mean, sum, max"):
        ours.reduce(torch.ones(1), "none")
    with pytest.raises(DataError, match=r"no mean of torch\.int64"):
        ours.reduce(torch.ones(1, dtype=torch.int64))
    with pytest.raises(TypeError, match="gather takes tensors"):
        ours.gather({"x": "text"})
    part = DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (3,)), [Shard(0)])
    for change in (ours.gather, ours.reduce, ours.broadcast):
        with pytest.raises(DataError, match=f"{change.__name__} takes whole tensors"):
            change(part)
    with pytest.raises(DataError, match="2 processes gave one"):
        ours.copy_tensor_to_devices(torch.ones(1) if rank else None)
    ours.check_operations(True)
    for change in (ours.reduce, ours.broadcast):
        with pytest.raises(ours.DistributedOperationException, match=f"{change.__name__} was called"):
            change(torch.ones(rank + 1))
    ours.check_operations(False)


def main() -> None:
    world = world_from_environment()
    assert current().size == 1
    # The script opens the group itself, and nothing but the group says who we are.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with clear_environment():
        gang = current()
    assert (gang.rank, gang.size) == (world.rank, world.size)
    assert current() is gang
    PeerState(cpu=True)
    for check in (as_the_peer_does, beyond_the_peer, values, refusals):
        check(world.rank)
    gang.barrier()
    leave()
