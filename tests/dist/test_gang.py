"""The processes of a job as one object."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch
from tests.dist.launch import on_ranks
from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.config.loop_options import DataLoaderConfiguration, GradientAccumulationPlugin
from windlass.config.plan import DistPlan, PrecisionPlan
from windlass.core.errors import ConfigError, DataError
from windlass.core.mesh import VIEWS, Mesh
from windlass.core.threads import wait_for_foreign_threads
from windlass.core.world import World, world_from_environment
from windlass.dist.beacon import beacon
from windlass.dist.gang import Gang, Outside, current, join, leave
from windlass.dist.listening import LOOPBACK, open_store
from windlass.transforms.ddp import DataParallel, Replicated


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
    assert all(gang.over(view) is gang for view in VIEWS)
    leave()
    assert not torch.distributed.is_initialized()


def test_a_mesh_of_another_number_of_ranks_is_refused_before_they_meet() -> None:
    with pytest.raises(ConfigError, match="has 4 ranks, and there are 2 processes"):
        join(World(0, 2), torch.device("cpu"), mesh=Mesh(replicate=2, tensor=2))


def test_a_view_that_no_mesh_has_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="view='batch': must be one of data, loss, expert, same_experts, context"
    ):
        Gang().over("batch")  # type: ignore[arg-type]


def test_a_worker_sees_the_views_of_its_process() -> None:
    seen = Outside(World(3, 4), Mesh(replicate=2, tensor=2))
    assert (seen.over("data").members, seen.over("data").rank) == ((1, 3), 1)
    assert seen.over("model").over("all").members == (0, 1, 2, 3)
    with pytest.raises(DataError, match="cannot exchange values with the 2 processes"):
        seen.over("data").barrier()


@pytest.mark.parametrize("kind", ["mps", "xla"])
def test_several_processes_on_a_device_for_one_are_refused_before_they_meet(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2: .*start one process, or use_cpu=True"):
        join(World(0, 2), torch.device(kind))


@pytest.mark.parametrize("named", ["nonesuch0", "lo,nonesuch0"])
def test_a_network_device_that_is_not_there_is_refused_before_they_meet(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    with pytest.raises(ConfigError, match=rf"GLOO_SOCKET_IFNAME='{named}': .*no nonesuch0; it has .*\blo\b"):
        join(World(0, 2), torch.device("cpu"))


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_processes_exchange_and_replicate(world: int) -> None:
    on_ranks(world, main)


@pytest.mark.dist
def test_processes_meet_again_while_one_still_leaves() -> None:
    on_ranks(2, meet_again, timeout=60)


@pytest.mark.dist
def test_they_meet_again_in_the_store_of_a_launcher() -> None:
    store, _ = open_store(LOOPBACK)
    on_ranks(2, meet_again, store.port, timeout=60)


@pytest.mark.dist
def test_processes_that_slurm_starts_meet() -> None:
    """Two tasks on one machine and one on the next, without the LOCAL_WORLD_SIZE of torchrun."""
    assert on_ranks(3, placed_by_slurm, timeout=60) == [[0, 1], [0, 1], [2]]


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK, SIZE, CPU = (
    int(os.environ.get("RANK", "0")),
    int(os.environ.get("WORLD_SIZE", "1")),
    torch.device("cpu"),
)


def sums_under_way_stay_out_of_python(gang: Gang) -> None:
    """A thread of the process group that enters Python makes a thread state, and all are numbered."""

    def thread_states() -> int:
        python = ctypes.pythonapi
        python.PyInterpreterState_Get.restype = python.PyThreadState_New.restype = ctypes.c_void_p
        python.PyThreadState_GetID.restype = ctypes.c_uint64
        state = ctypes.c_void_p(python.PyThreadState_New(ctypes.c_void_p(python.PyInterpreterState_Get())))
        number = int(python.PyThreadState_GetID(state))
        python.PyThreadState_Clear(state)
        python.PyThreadState_Delete(state)
        return number

    wait_for_foreign_threads()
    before = thread_states()
    for number in range(300):
        assert gang.start_sum([float(number), 1.0]).wait() == [number * SIZE, SIZE]
    wait_for_foreign_threads()
    assert thread_states() - before == 1


def exchanges(gang: Gang) -> None:
    assert (gang.rank, gang.size) == (RANK, SIZE)
    assert gang.sum(torch.tensor([1.0, float(RANK)])).tolist() == [SIZE, SIZE * (SIZE - 1) / 2]
    sums_under_way_stay_out_of_python(gang)
    first, second = gang.start_sum([0.1, 2]), gang.start_sum([float(RANK)])
    assert second.wait() == [SIZE * (SIZE - 1) / 2]
    assert abs(first.wait()[0] - 0.1 * SIZE) < 1e-15, "in double precision"
    gathered = gang.gather_objects({"rank": RANK, "text": "é" * RANK, "nothing": None})
    assert gathered == [{"rank": r, "text": "é" * r, "nothing": None} for r in range(SIZE)]
    assert gang.broadcast_object(f"from {RANK}") == "from 0"
    assert gang.vote(True)
    assert not gang.vote(RANK != SIZE - 1), "one no is a no"


def accelerators(gang: Gang) -> None:
    accelerator = Accelerator.of_run(
        gang,
        CPU,
        PrecisionPlan(),
        GradientAccumulationPlugin(num_steps=1),
        DataLoaderConfiguration(),
        TrainerEngine(DistPlan),
    )
    rows = torch.full((RANK + 1, 2), float(RANK))
    expected = torch.cat([torch.full((r + 1, 2), float(r)) for r in range(SIZE)])
    assert torch.equal(accelerator.gather(rows), expected), "sizes may differ"
    assert accelerator.gather(torch.tensor(RANK)).tolist() == list(range(SIZE))
    for call in ("gather", "reduce"):  # that others wait here is named by the watchdog
        getattr(accelerator, call)(rows[:1])
        assert beacon().mark().call == f"after {call} tensors"
    assert accelerator.is_main_process == (RANK == 0)
    assert accelerator.on_main_process(lambda: 1)() == (1 if RANK == 0 else None)


def replication() -> None:
    torch.manual_seed(RANK)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.note = "lent"  # type: ignore[assignment]
    strategy = DataParallel(module, DistPlan(), current())
    model = strategy.model
    assert isinstance(model, Replicated)
    assert model.note == "lent"
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()

    def backward() -> torch.Tensor:
        loss = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        return loss

    strategy.warm_up(backward)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    forwards = model.forwards
    with strategy.micro(last=False):
        backward()
    own = module[0].weight.grad.clone()
    assert not same_everywhere(own), "not reduced before the last micro-batch"
    with strategy.micro(last=True):
        backward()
    assert same_everywhere(module[0].weight.grad)
    assert model.forwards == forwards + 2
    mine = module[1].running_mean.clone()
    assert not same_everywhere(mine)
    with strategy.buffers_of_first_rank():
        assert same_everywhere(module[1].running_mean)
    assert torch.equal(module[1].running_mean, mine)
    strategy.share_buffers()
    assert same_everywhere(module[1].running_mean)


def same_everywhere(value: torch.Tensor) -> bool:
    parts = [torch.empty_like(value) for _ in range(SIZE)]
    torch.distributed.all_gather(parts, value.contiguous())
    return all(torch.equal(part, parts[0]) for part in parts)


def views_of_data_alone(gang: Gang) -> None:
    assert gang.over("data") is gang.over("loss") is gang.over("all") is gang
    alone = gang.over("model")
    assert (alone.rank, alone.size, alone.world) == (0, 1, gang.world)
    assert alone.gather_objects(RANK) == [RANK]
    assert alone.over("all") is gang


def main() -> None:
    gang = join(world_from_environment(), CPU, 60)
    assert join(world_from_environment(), CPU, 60) is gang, "met once"
    exchanges(gang)
    views_of_data_alone(gang)
    accelerators(gang)
    replication()
    gang.barrier()
    leave()
    leave()


def placed_by_slurm() -> list[int]:
    """The ranks of this machine, with which it exchanges alone."""
    node, local = divmod(RANK, 2)
    del os.environ["LOCAL_WORLD_SIZE"]
    os.environ.update(LOCAL_RANK=str(local), SLURM_TASKS_PER_NODE="2,1", SLURM_NODEID=str(node))
    gang = join(world_from_environment(), CPU, 60)
    there = torch.zeros(SIZE)
    there[RANK] = 1
    torch.distributed.all_reduce(there, group=gang.machine_group())
    leave()
    return there.nonzero().flatten().tolist()


MEETINGS, LATE_SECONDS = 4, 0.5


def meet_again(port: int | None = None) -> None:
    if port is not None:  # of a launcher's store
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    world = world_from_environment()
    for meeting in range(MEETINGS):
        gang = join(world, torch.device("cpu"), 20)
        assert gang.gather_objects((meeting, world.rank)) == [(meeting, 0), (meeting, 1)]
        if world.rank == meeting % 2:
            time.sleep(LATE_SECONDS)
        leave()
