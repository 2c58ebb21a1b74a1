"""The composition root: a plan becomes executor and schedule; a user's own objects stay the same objects."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from windlass import TrainingArguments
from windlass.assemble.build import build
from windlass.assemble.resolve import resolve_call, resolve_run
from windlass.assemble.rules import Facts
from windlass.config.plan import DistPlan
from windlass.core.errors import ConfigError
from windlass.core.mesh import Mesh
from windlass.core.world import World, world_from_environment
from windlass.dist.gang import Gang, join
from windlass.dist.imagined import imagined_job
from windlass.optim.optimizers.adalomo import AdaLomo
from windlass.optim.schedule import UserSchedule
from windlass.precision.scaler import LossScaler

CPU = torch.device("cpu")


def plan_of(**changes: Any) -> Any:
    args = TrainingArguments("out", use_cpu=True, **changes)
    return resolve_run(args, resolve_call(args, World()), Facts(10))


def test_a_late_optimizer_that_updates_in_the_backward_is_refused_where_layers_are_divided() -> None:
    """`create_optimizer` of a script makes it, after it was chosen how gradients are reduced."""
    model: Any = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    model.tp_plan = {"0": "colwise", "1": "rowwise"}

    def create(steps: int) -> tuple[Any, Any]:
        optimizer = AdaLomo(model.parameters(), in_backward=True)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    with imagined_job(2):
        ranks = join(world_from_environment(), CPU, 60, mesh=Mesh(tensor=2))
        plan = dataclasses.replace(plan_of(), dist=DistPlan(tensor=2))
        with pytest.raises(ConfigError, match="gradients are reduced in another way"):
            build(model, create, plan, CPU, ranks.over("loss"))


def test_an_optimizer_that_computes_the_loss_itself_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ConfigError, match="optimizers='LBFGS': its step computes the loss several times"):
        build(model, lambda steps: (optimizer, scheduler), plan_of(), CPU, Gang())


def test_own_objects_keep_their_identity() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    asked: list[int] = []

    def create(steps: int) -> tuple[Any, Any]:
        asked.append(steps)
        return optimizer, scheduler

    built = build(model, create, plan_of(num_train_epochs=2), CPU, Gang())
    assert asked == [20]
    assert built.executor.model is model
    assert built.executor.optimizer is optimizer
    assert isinstance(built.schedule, UserSchedule)
    assert built.schedule.exposed is scheduler


@pytest.mark.parametrize("missing", ["optimizer", "lr_scheduler"])
def test_a_part_that_was_not_made_is_named(missing: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = None if missing == "optimizer" else torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=rf"{missing}=None.*must set self\.{missing}"):
        build(model, lambda steps: (optimizer, None), plan_of(), CPU, Gang())


def test_fp16_brings_its_scaler() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    built = build(model, lambda steps: (optimizer, scheduler), plan_of(fp16=True), CPU, Gang())
    assert built.executor.state_dict()["scaler"].keys() == LossScaler(CPU).state_dict().keys()
