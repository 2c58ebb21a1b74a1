"""Memory, seeds, loggers and local SGD of user-owned loops."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.dist.launch import on_ranks
from torch import Tensor, nn

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.device_cache import should_reduce_batch_size
from windlass.compat.batch_size import find_executable_batch_size, release_memory
from windlass.compat.loaders import set_seed, synchronize_rng_states
from windlass.compat.local_sgd import LocalSGD
from windlass.compat.plugins import ParallelismConfig
from windlass.compat.rank_logging import get_logger
from windlass.compat.state import AcceleratorState, PartialState
from windlass.core.errors import ConfigError, ModelError
from windlass.dist.operations import gather


@pytest.mark.dist
def test_two_processes() -> None:
    on_ranks(2, main)


@pytest.mark.dist
def test_weights_that_ranks_divide_are_not_averaged(tmp_path: Path) -> None:
    on_ranks(2, divided)


@pytest.fixture
def stateless() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_logger_knows_its_rank_before_it_joins_the_others(
    stateless: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        get_logger("script").warning("the main process")
        get_logger("script").warning("all of them", main_process_only=False)
    with pytest.raises(ModelError, match="create a PartialState"):
        get_logger("script").warning("one after the other", in_order=True)
    assert not PartialState._shared_state
    assert caplog.messages == ["[RANK 0] the main process", "[RANK 0] all of them", "[RANK 1] all of them"]


def test_sizes_shrink_until_they_fit_and_stay() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, factor: int, *, word: str = "") -> tuple[int, str]:
        tried.append(batch_size)
        if batch_size > 75:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch_size * factor, word

    assert train(2, word="x") == (144, "x")
    assert tried == [100, 90, 81, 72]
    assert train(1) == (72, "")
    assert tried[4:] == [72]


def test_a_size_of_ones_own_choosing() -> None:
    sizes = iter([50, 20])

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> int:
        if batch_size > 20:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return batch_size

    assert train() == 20


def test_what_does_not_fit_is_let_go_before_the_next_try() -> None:
    held: list[weakref.ref[nn.Module]] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        assert not any(ref() for ref in held), "the model of the last try is still there"
        model = nn.Linear(1, 1)
        held.append(weakref.ref(model))
        raise MemoryError if batch_size > 1 else KeyError("another error")

    with pytest.raises(KeyError, match="another error"):
        train()
    assert len(held) == 2


def test_nothing_fits() -> None:
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(ModelError, match="not even one of a single sample"):
        train()


def test_the_batch_size_is_not_the_callers_to_give() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: object) -> None: ...

    with pytest.raises(TypeError, match="leave the batch size out"):
        train(128, "model")


def test_other_errors_are_no_reason() -> None:
    assert not should_reduce_batch_size(RuntimeError("shapes do not fit"))
    assert not should_reduce_batch_size(KeyError("out of memory"))


def test_released_objects_are_gone() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    ref = weakref.ref(model)
    model, other = release_memory(model, other)
    gc.collect()
    assert model is None
    assert other is None
    assert ref() is None


# --- what each rank runs ----------------------------------------------------------------------------------------------


def everywhere(value: Tensor) -> list[float]:
    return gather(value.reshape(1)).tolist()


def generators(rank: int) -> None:
    set_seed(7, device_specific=True)
    drawn = everywhere(torch.rand(()))
    assert drawn[0] != drawn[1]
    random.seed(7 + rank)
    np.random.seed(7 + rank)
    wanted = random.random(), np.random.rand()
    set_seed(7, device_specific=True)
    assert (random.random(), np.random.rand()) == wanted
    own = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator=own)
    assert len(set(everywhere(torch.rand(())))) == 1
    assert len(set(everywhere(torch.rand((), generator=own)))) == 1
    with pytest.raises(ConfigError, match="needs the argument"):
        synchronize_rng_states(["generator"])
    with pytest.raises(ConfigError, match="computes on cpu"):
        synchronize_rng_states(["cuda"])


class Heard(logging.Handler):
    """Keeps what was said, and where it was said from."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.funcName}: {record.getMessage()}")


def loggers(rank: int) -> None:
    heard = Heard()
    log = get_logger("script", log_level="INFO")
    log.logger.addHandler(heard)
    log.info("main alone")
    log.info("all of %d", 2, main_process_only=False)
    log.info("in turn", in_order=True)
    log.debug("too quiet", main_process_only=False)
    log.warning_once("once")
    log.warning_once("once")
    mine = [f"loggers: [RANK {rank}] all of 2", f"loggers: [RANK {rank}] in turn"]
    if rank == 0:
        assert heard.said[0] == "loggers: [RANK 0] main alone"
        assert heard.said[1:3] == mine
        assert len(heard.said) == 4, heard.said
    else:
        assert heard.said == mine


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def by_hand(steps: int, every: int) -> Tensor:
    """Both processes' models here, each trained on its own data, their weights averaged every so often."""
    models = [linear(), linear()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]

    def average() -> None:
        with torch.no_grad():
            for pair in zip(*(m.parameters() for m in models), strict=True):
                mean = (pair[0] + pair[1]) / 2
                for parameter in pair:
                    parameter.copy_(mean)

    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % every == 0:
            average()
    average()
    return models[0].weight.detach()


def local_updates(accelerator: Accelerator) -> None:
    model = linear()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, local_sgd_steps=3) as local:
        for step in range(1, 8):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(step, accelerator.process_index)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            local.step()
            if step == 2:
                assert len(set(everywhere(model.weight[0, 0].detach()))) == 2, (
                    "each goes its own way in between"
                )
    weight = accelerator.unwrap_model(model).weight.detach()
    assert torch.allclose(weight, by_hand(7, 3), rtol=0, atol=1e-12)
    accelerator.backward(model(batch(9, accelerator.process_index)).square().mean())
    assert len(set(everywhere(model.weight.grad[0, 0]))) == 1, "afterwards gradients are reduced again"
    with pytest.raises(ConfigError, match="at least 1"):
        LocalSGD(accelerator, model, 0)


class Forked(nn.Module):
    """Two branches, of which the forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.left(inputs)


def unused_parameters_stop_the_first_update(accelerator: Accelerator) -> None:
    module = Forked()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    before = module.left.weight.detach().clone()
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.ones(2, 3)).sum())
    accelerator.backward(model(torch.ones(2, 3)).sum())
    with pytest.raises(ModelError, match=r"2 of 4 trained parameters: right\.weight, right\.bias"):
        optimizer.step()
    assert torch.equal(module.left.weight, before)


def divided() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    LocalSGD(accelerator, nn.Linear(2, 2), 2, enabled=False)
    with pytest.raises(ConfigError, match=r"parallelism_config"):
        LocalSGD(accelerator, nn.Linear(2, 2), 2)
    accelerator.wait_for_everyone()  # a rank that ended now would break the connections that another is opening
    accelerator.end_training()


def main() -> None:
    accelerator = Accelerator(cpu=True)
    generators(accelerator.process_index)
    loggers(accelerator.process_index)
    local_updates(accelerator)
    unused_parameters_stop_the_first_update(accelerator)
    accelerator.end_training()
