"""Small things that the optimizer tests share."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from windlass.config.plan import OptimizerPlan
from windlass.core.logs import get_logger
from windlass.optim.groups import parameter_groups
from windlass.optim.registry import make_optimizer, optimizer_factory


def decay_groups(
    model: nn.Module, weight_decay: float, decaying: list[str] | None = None
) -> list[dict[str, Any]]:
    """The groups of a run without patterns."""
    return parameter_groups(model, OptimizerPlan(weight_decay=weight_decay), decaying)


def parameters(lr: float = 0.1, groups: int = 1) -> torch.optim.SGD:
    """An optimizer whose groups start at lr, 2 lr, 3 lr, ..."""
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr * (i + 1)} for i in range(groups)], lr=lr
    )


class Net(nn.Module):
    """One of each kind of parameter that decay distinguishes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.zeros(3))
        self.embed = nn.Embedding(7, 3)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"attn": nn.Linear(3, 3), "ln": nn.LayerNorm(3)}) for _ in range(2)]
        )
        self.q_norm = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 7, bias=False)


@contextlib.contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """What Windlass logs in this block, from `level` on; by a handler of our own, as its loggers do not propagate."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = get_logger()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


SHAPES = ((3, 4), (5,), (2, 3, 4))


def five_steps(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
    steps: int = 5,
) -> list[torch.Tensor]:
    """Parameters of several shapes after updates with gradients that depend on them; the same for equal optimizers."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    held = [nn.Parameter(start) for start in starts]
    optimizer = make(held)
    for _ in range(steps):
        for parameter in held:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (0.3 * parameter.detach().float() + noise).to(dtype)
        optimizer.step()
    return [parameter.detach() for parameter in held]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance), (
            (one - other).abs().max()
        )


def five_updates_like_the_librarys(plan: OptimizerPlan) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Assert that our class of a library's optimizer makes its updates; return the trained layer and our optimizer."""
    cls, kwargs = optimizer_factory(plan)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    other = copy.deepcopy(model)
    ours = make_optimizer(decay_groups(model, 0.1), cls, kwargs)
    theirs = cls.__bases__[0](decay_groups(other, 0.1), **kwargs)
    for _ in range(5):
        inputs = torch.randn(8, 64)
        for trained, optimizer in ((model, ours), (other, theirs)):
            trained(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.weight, other.weight)
    return model, ours
