"""Run by `torch.distributed.run`: what processes exchange, and what replication does to a model."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.config.plan import DistPlan, PrecisionPlan
from windlass.config.plugins import DataLoaderConfiguration, GradientAccumulationPlugin
from windlass.core.foreign_threads import wait_for_foreign_threads
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.transforms.ddp import DataParallel, Replicated

RANK, SIZE, CPU = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu")


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
        TrainerEngine(list, DistPlan),
    )
    rows = torch.full((RANK + 1, 2), float(RANK))
    expected = torch.cat([torch.full((r + 1, 2), float(r)) for r in range(SIZE)])
    assert torch.equal(accelerator.gather(rows), expected), "sizes may differ"
    assert accelerator.gather(torch.tensor(RANK)).tolist() == list(range(SIZE))
    assert accelerator.is_main_process == (RANK == 0)
    assert accelerator.on_main_process(lambda: 1)() == (1 if RANK == 0 else None)


def replication() -> None:
    torch.manual_seed(RANK)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.note = "lent"  # type: ignore[assignment]
    strategy = DataParallel(module, DistPlan())
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


def main() -> None:
    gang = join(world_from_environment(), CPU, 60)
    assert join(world_from_environment(), CPU, 60) is gang, "met once"
    exchanges(gang)
    accelerators(gang)
    replication()
    gang.barrier()
    leave()
    leave()


if __name__ == "__main__":
    main()
