"""The processes of a job as one object."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch

from windlass.core.errors import ConfigError
from windlass.core.world import World
from windlass.dist.gang import Gang, join, leave
from windlass.dist.listening import LOOPBACK, open_store

HERE = Path(__file__).parent


def test_a_gang_of_one_asks_nobody() -> None:
    gang = join(World(), torch.device("cpu"))
    assert type(gang) is Gang
    assert (gang.rank, gang.size, gang.host_group) == (0, 1, None)
    assert gang.start_sum([1.0, 2.0]).wait() == [1.0, 2.0]
    value = torch.ones(2)
    assert gang.sum(value) is value
    assert gang.sum_on_device(value) is value
    assert gang.gather_objects({"a": 1}) == [{"a": 1}]
    assert gang.broadcast_object("x") == "x"
    assert [gang.vote(True), gang.vote(False)] == [True, False]
    gang.barrier()
    leave()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("kind", ["mps", "xla"])
def test_several_processes_on_a_device_for_one_are_refused_before_they_meet(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2: .*start one process, or use_cpu=True"):
        join(World(0, 2), torch.device(kind))


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_processes_exchange_and_replicate(world: int) -> None:
    launch(world, HERE / "gang_ranks.py")


@pytest.mark.dist
def test_processes_meet_again_while_one_still_leaves() -> None:
    launch(2, HERE / "rejoining_ranks.py", timeout=60)


@pytest.mark.dist
def test_they_meet_again_in_the_store_of_a_launcher() -> None:
    store, _ = open_store(LOOPBACK)
    launch(2, HERE / "rejoining_ranks.py", store.port, timeout=60)
