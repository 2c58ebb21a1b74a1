"""What loading holds and reads: of one tensor after another the rows that this rank has, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.faults import write_parts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from windlass.checkpoint import codec
from windlass.checkpoint.optimizer_state import (
    join_parts,
    load_optimizer_state,
    save_optimizer_state,
    split_optimizer_state,
)
from windlass.checkpoint.sharded import load_parts, open_parts
from windlass.checkpoint.tensor_file import TensorFile
from windlass.checkpoint.weights import load_weights, save_weights
from windlass.core.world import World
from windlass.dist.sharded import local, part

SIZE, LAYERS = 256, 6
EIGHT, EIGHT_ROWS = (pytest.param(*values, marks=pytest.mark.slow) for values in ((8,), (8, 0)))
TENSOR = SIZE * SIZE * 4  # bytes of the largest tensor
SLACK = 2 << 10  # scalars, and what the profiler rounds up


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, SIZE)).sum().backward()
    optimizer.step()
    return module, optimizer


def ranks(world: int) -> Iterator[World]:
    """This process as each rank of a world in turn."""
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield World(rank, world, rank, world)
        finally:
            dist.destroy_process_group()


def spread_(module: nn.Module, world: World, dim: int = 0) -> nn.Module:
    """The parameters become sharded along `dim`, where they have it, each rank with its part of their values."""
    mesh = init_device_mesh("cpu", (world.size,))
    for member in module.modules():
        for name, parameter in list(member.named_parameters(recurse=False)):
            placed = Shard(dim) if dim < parameter.dim() else Replicate()
            # Not nn.Parameter(...): that is an operation, of which PyTorch remembers the mesh of an earlier "rank".
            sharded = cut(parameter.detach(), mesh, placed).requires_grad_()
            sharded._is_param = True
            member.register_parameter(name, sharded)  # type: ignore[arg-type]
    return module


def cut(whole: Tensor, mesh: object, placed: Shard | Replicate) -> DTensor:
    like = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    empty = whole[:0] if whole.dim() else whole
    there = part(DTensor.from_local(empty, mesh, [placed], **like))
    return DTensor.from_local(there.of(whole).clone(), mesh, [placed], **like)


def spread_optimizer_(module: nn.Module, moments: dict[str, dict[str, Tensor]]) -> torch.optim.Optimizer:
    """AdamW on sharded parameters, with each rank's part of the moments of whole ones."""
    optimizer = torch.optim.AdamW(module.parameters())
    for name, parameter in module.named_parameters():
        optimizer.state[parameter] = {
            key: cut(value, parameter.device_mesh, parameter.placements[0]) if value.dim() else value
            for key, value in moments[name].items()
        }
    return optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights and moments whole, and in the parts of four ranks."""
    made = tmp_path_factory.mktemp("loading")
    module, optimizer = trained()
    save_weights(made, module.state_dict())
    state = save_optimizer_state(optimizer, module)
    codec.save_state(made / "optimizer", state)
    for world in ranks(4):
        sharded = spread_(trained()[0], world)
        write_parts(made, "model", sharded.state_dict(keep_vars=True), world)
        rest, parts = split_optimizer_state(spread_optimizer_(sharded, state["state"]), sharded)
        write_parts(made, "optimizer", parts, world)
        if world.is_main:
            codec.save_state(made / "rest", rest)
    return made


def load_optimizer(folder: Path, in_parts: bool, module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    if not in_parts:
        with codec.open_state(folder / "optimizer") as state:
            load_optimizer_state(optimizer, module, state)
        return optimizer
    with codec.open_state(folder / "rest") as state, open_parts(folder, "optimizer") as parts:
        load_optimizer_state(optimizer, module, join_parts(state, parts))
    return optimizer


def measured(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes of tensors that `work` held at most at once, and that what it gave still holds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.disable()  # or what earlier work left would be counted as freed
    try:
        with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
            kept = work()
    finally:
        gc.enable()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del kept
    return peak, held


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much of tensors was read from files, in order."""
    seen: list[int] = []
    original = TensorFile._fill

    def counted(self: TensorFile, view: memoryview) -> None:
        seen.append(len(view))
        original(self, view)

    monkeypatch.setattr(TensorFile, "_fill", counted)
    return seen


def test_the_measure_sees_what_is_held() -> None:
    peak, held = measured(lambda: [torch.empty(1000), torch.empty(5000).sum()])
    assert 24_000 <= peak < 26_000
    assert 4_000 <= held < 6_000


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize(("size", "dim"), [(1, 0), (2, 0), (4, 0), EIGHT_ROWS, (3, 0), (2, 1)])
def test_weights(folder: Path, in_parts: bool, size: int, dim: int, bytes_read: list[int]) -> None:
    wanted, load = trained()[0].state_dict(), load_parts if in_parts else load_weights
    for world in ranks(size):
        module = spread_(model(), world, dim)
        own = sum(local(p).nbytes for p in module.parameters())
        largest = max(local(p).nbytes for p in module.parameters())
        bytes_read.clear()
        peak, held = measured(lambda module=module: load(folder, module))  # type: ignore[misc]
        assert held == 0
        rows_of_others = TENSOR if dim else 0  # columns do not lie together: rows are read and cut
        assert largest <= peak <= largest + rows_of_others + SLACK
        headers = 8 * 4096
        assert sum(bytes_read) <= own * (size if dim else 1) + headers
        for name, parameter in module.named_parameters():
            assert torch.equal(local(parameter), part(parameter).of(wanted[name]))


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4, EIGHT, 3])
def test_an_optimizers_state(folder: Path, in_parts: bool, size: int, bytes_read: list[int]) -> None:
    wanted = trained()[1].state_dict()["state"]
    for world in ranks(size):
        module = spread_(model(), world)
        own = sum(local(p).nbytes for p in module.parameters())
        largest = max(local(p).nbytes for p in module.parameters())
        made: list[torch.optim.Optimizer] = []

        def load(m: nn.Module = module, made: list[torch.optim.Optimizer] = made) -> None:
            made.append(load_optimizer(folder, in_parts, m))

        bytes_read.clear()
        peak, held = measured(load)
        assert 2 * own <= held <= 2 * own + 4 * SLACK
        assert peak <= held + largest + SLACK
        assert sum(bytes_read) <= 2 * own + 16 * 4096
        for index, entry in enumerate(made[0].state.values()):
            for key, value in entry.items():
                assert torch.equal(local(value), part(value).of(wanted[index][key])), key


def test_a_plain_model_too(folder: Path) -> None:
    module = model()
    assert measured(lambda: load_parts(folder, module))[0] <= TENSOR + SLACK
    peak, held = measured(lambda: load_optimizer(folder, True, module))
    assert peak <= held + TENSOR + SLACK
