"""Schedulers whose state is not plain data: what is saved of it, and what comes back."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.optim.helpers import parameters
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from windlass.checkpoint.codec import decode, encode
from windlass.core.errors import CheckpointError
from windlass.optim.schedule import FactorSchedule, UserSchedule


class Phase(Enum):
    RISE = "rise"
    FALL = "fall"


class Bounds(NamedTuple):
    low: float
    high: float


class Odd(LRScheduler):
    """Has one attribute of each kind that a script may have."""

    def __init__(self, optimizer: Any) -> None:
        self.phase, self.dtype, self.seen = Phase.RISE, torch.float32, {1}
        self.folder, self.recent = Path("runs"), deque([0.5], maxlen=3)
        self.bounds, self.counts = Bounds(0.0, 1.0), {"milestones": Counter([2])}
        self.method, self.function, self.part, self.kind = self.rate, len, functools.partial(max, 1), dict
        self.functions: list[Any] = [abs, self.rate]
        self.rates: defaultdict[int, list[float]] = defaultdict(list, {0: [0.5]})
        super().__init__(optimizer)

    def rate(self, base: Any) -> Any:
        return base * len(self.seen)

    def get_lr(self) -> list[Any]:
        return [self.method(base) for base in self.base_lrs]

    def move(self) -> None:
        self.phase, self.dtype, self.seen = Phase.FALL, torch.bfloat16, {1, 2, 3}
        self.folder, self.bounds = Path("others"), Bounds(0.25, 2.0)
        self.recent.append(0.75)
        self.counts["milestones"][7] += 1
        self.rates[1].append(0.25)


def resumed(make: Any, steps: int = 3) -> tuple[UserSchedule, UserSchedule]:
    """A scheduler after some updates, and another one that was made again and loaded its state."""
    schedules = []
    for _ in range(2):
        optimizer = parameters()
        schedules.append(UserSchedule(make(optimizer), optimizer))
    first, second = schedules
    for step in range(steps):
        first.set(step)
        first.optimizer.step()
        first.advance()
    if isinstance(first.inner, Odd):
        first.inner.move()
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(decode(*encode(first.state_dict())))
    return first, second


def test_each_attribute_comes_back_in_its_type() -> None:
    first, second = (schedule.inner for schedule in resumed(Odd))
    for name in ("phase", "dtype", "seen", "folder", "recent", "bounds", "counts", "rates"):
        one, other = getattr(first, name), getattr(second, name)
        assert (type(one), one) == (type(other), other), name
    assert type(second.counts["milestones"]) is Counter
    assert second.recent.maxlen == 3
    assert second.rates[9] == []
    assert second.method.__self__ is second
    assert second.functions[1].__self__ is second
    assert (second.function, second.kind, second.part(0)) == (len, dict, 1)


def test_torchs_schedulers_go_on_with_the_same_rates() -> None:
    makers = {
        "multi": lambda o: MultiStepLR(o, [2, 4]),
        "lambda": lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
        "sequential": lambda o: SequentialLR(o, [LinearLR(o, total_iters=2), MultiStepLR(o, [1, 2])], [2]),
        "chained": lambda o: ChainedScheduler([LinearLR(o, total_iters=2), MultiStepLR(o, [2, 4])]),
        "cycle": lambda o: OneCycleLR(o, max_lr=0.5, total_steps=9),
        "cyclic": lambda o: CyclicLR(o, 0.1, 0.5, step_size_up=3, scale_fn=lambda x: 1 / (x + 1)),
        "average": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
        "cosine": lambda o: CosineAnnealingLR(o, 9),
    }
    for name, make in makers.items():
        both = resumed(make)
        rates: list[list[float]] = [[], []]
        for found, schedule in zip(rates, both, strict=True):
            for step in range(3, 6):
                schedule.set(step)
                found.append(schedule.last_lrs()[0])
                schedule.optimizer.step()
                schedule.advance()
        assert rates[0] == rates[1], name


def test_the_state_of_another_kind_of_schedule_is_refused() -> None:
    """Before, the number of the update replaced the method `step`, which failed in the first evaluation."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    by_update = FactorSchedule(optimizer, lambda step: 1 / (step + 1))
    by_metric = UserSchedule(ReduceLROnPlateau(optimizer))
    by_count, by_list = (UserSchedule(made) for made in (StepLR(optimizer, 2), MultiStepLR(optimizer, [2])))
    nested = [
        UserSchedule(SequentialLR(optimizer, [made(optimizer), StepLR(optimizer, 2)], [2]))
        for made in (LinearLR, ConstantLR)
    ]
    pairs = [
        (by_update, by_metric),
        (by_metric, by_update),
        (by_count, by_list),
        (by_metric, by_list),
        nested,
    ]
    for live, saved in pairs:
        with pytest.raises(
            CheckpointError, match="continue with the schedule that it was saved with"
        ) as error:
            live.load_state_dict(saved.state_dict())
    assert (
        "lr_scheduler_type: the schedule of this run is SequentialLR of LinearLR and StepLR, and the checkpoint's is "
        "SequentialLR of ConstantLR and StepLR" in str(error.value)
    )
    by_metric.observe(1.0)
