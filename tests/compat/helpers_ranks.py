"""Two processes: generators made equal, loggers that take turns, and updates that are averaged every so often."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from windlass.accelerator.accelerator import Accelerator
from windlass.compat.local_sgd import LocalSGD
from windlass.compat.rank_logging import get_logger
from windlass.compat.seeds import set_seed, synchronize_rng_states
from windlass.core.errors import ConfigError, ModelError
from windlass.dist.operations import gather


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


def main() -> None:
    accelerator = Accelerator(cpu=True)
    generators(accelerator.process_index)
    loggers(accelerator.process_index)
    local_updates(accelerator)
    unused_parameters_stop_the_first_update(accelerator)
    print("helpers are right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
