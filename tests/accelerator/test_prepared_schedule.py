"""What advances a prepared schedule (on several ranks: `loop_ranks.py`; copies: `test_copies.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass import Accelerator

ACCUMULATION, UPDATES = 4, 10


def rates(accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any, *metric: float) -> list[float]:
    """The learning rate after each update."""
    found = []
    for _ in range(accelerator.gradient_accumulation_steps * UPDATES):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            schedule.step(*metric)
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append(schedule.get_last_lr()[0])
    return found


def alone(make: Any) -> list[float]:
    """The learning rate after each update of torch's own loop."""
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    schedule, found = make(optimizer), []
    for _ in range(UPDATES):
        optimizer.step()
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    return found


@pytest.mark.parametrize("unit", ["loader_batch", "optimizer_step"])
def test_a_schedule_with_an_end_counts_updates_and_not_their_micro_batches(unit: str) -> None:
    def one_cycle(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=UPDATES)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, scheduler_unit=unit)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared = accelerator.prepare(model, optimizer, one_cycle(optimizer))
    assert rates(accelerator, *prepared) == alone(one_cycle)


def test_a_schedule_with_an_end_does_not_go_past_it() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=UPDATES - 3)
    *_, schedule = prepared = accelerator.prepare(model, optimizer, schedule)
    assert len(set(rates(accelerator, *prepared)[-4:])) == 1
    assert schedule.scheduler.last_epoch == UPDATES - 3


@pytest.mark.parametrize("unit", ["loader_batch", "optimizer_step"])
def test_a_schedule_may_be_prepared_before_its_optimizer(unit: str) -> None:
    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    accelerator, model = Accelerator(cpu=True, scheduler_unit=unit), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other: Any = accelerator.prepare(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0))
    schedule: Any = accelerator.prepare(halving(optimizer))
    model, optimizer = accelerator.prepare(model, optimizer)
    assert schedule.optimizers == [optimizer] != [other]
    assert rates(accelerator, model, optimizer, schedule) == alone(halving)


def test_a_schedule_of_a_prepared_optimizer_counts_from_where_it_is() -> None:
    accelerator, model = Accelerator(cpu=True, scheduler_unit="optimizer_step"), nn.Linear(2, 1)
    model, optimizer, other = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0),
    )
    schedule: Any = None
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        if schedule is None:
            schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        else:
            schedule.step()
    assert schedule.optimizers == [optimizer] != [other]
    assert schedule.get_last_lr() == [0.5]
    for loads in (True, False):
        optimizer.step()
        if loads:
            schedule.load_state_dict(schedule.state_dict())
    schedule.step()
    assert schedule.get_last_lr() == [0.25], "of the updates after it was loaded"


def test_a_schedule_of_a_metric_accumulates() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    prepared = accelerator.prepare(model, optimizer, schedule)
    assert rates(accelerator, *prepared, 1.0) == [1.0] * 4 + [0.5] * 4 + [0.25] * 2
