"""The public schedule helpers have transformers' signatures and give its learning rates."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from tests.optim.helpers import parameters
from torch.optim.lr_scheduler import LambdaLR

from windlass.config.enums import SchedulerType
from windlass.core.errors import ConfigError
from windlass.optim import public

HELPERS: dict[str, dict[str, Any]] = {
    "get_constant_schedule": {},
    "get_constant_schedule_with_warmup": {"num_warmup_steps": 3},
    "get_linear_schedule_with_warmup": {"num_warmup_steps": 3, "num_training_steps": 12},
    "get_cosine_schedule_with_warmup": {"num_warmup_steps": 3, "num_training_steps": 12},
    "get_cosine_with_hard_restarts_schedule_with_warmup": {
        "num_warmup_steps": 3,
        "num_training_steps": 12,
        "num_cycles": 2,
    },
    "get_polynomial_decay_schedule_with_warmup": {
        "num_warmup_steps": 3,
        "num_training_steps": 12,
        "power": 2.0,
    },
    "get_inverse_sqrt_schedule": {"num_warmup_steps": 3},
    "get_cosine_with_min_lr_schedule_with_warmup": {
        "num_warmup_steps": 3,
        "num_training_steps": 12,
        "min_lr": 0.01,
    },
    "get_cosine_with_min_lr_schedule_with_warmup_lr_rate": {
        "num_warmup_steps": 3,
        "num_training_steps": 12,
        "min_lr_rate": 0.1,
    },
    "get_wsd_schedule": {"num_warmup_steps": 3, "num_decay_steps": 4, "num_training_steps": 12},
    "get_reduce_on_plateau_schedule": {"patience": 1},
    "get_greedy_schedule": {"patience": 1},
}


@pytest.mark.parametrize("name", [*HELPERS, "get_scheduler"])
def test_signature_is_transformers(name: str) -> None:
    theirs = getattr(pytest.importorskip("transformers.optimization"), name)
    ours = getattr(public, name)
    for function in (theirs, ours):
        assert callable(function)
    assert [(p.name, p.default, p.kind) for p in inspect.signature(ours).parameters.values()] == [
        (p.name, p.default, p.kind) for p in inspect.signature(theirs).parameters.values()
    ]


@pytest.mark.parametrize("name", [n for n in HELPERS if "plateau" not in n and "greedy" not in n])
def test_rates_are_transformers(name: str) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    ours_on, theirs_on = parameters(), parameters()
    ours = getattr(public, name)(ours_on, **HELPERS[name])
    theirs = getattr(optimization, name)(theirs_on, **HELPERS[name])
    assert isinstance(ours, LambdaLR)
    for _ in range(12):
        assert ours.get_last_lr() == theirs.get_last_lr()
        for optimizer, scheduler in ((ours_on, ours), (theirs_on, theirs)):
            optimizer.step()
            scheduler.step()


def test_get_scheduler_takes_the_enum_too() -> None:
    scheduler = public.get_scheduler(SchedulerType.LINEAR, parameters(), 0, 4)
    assert scheduler.get_last_lr() == [0.1]


@pytest.mark.parametrize(
    ("warmup", "total", "field"), [(None, 4, "num_warmup_steps"), (0, None, "num_training_steps")]
)
def test_missing_lengths_are_named(warmup: int | None, total: int | None, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=None: the linear schedule needs it"):
        public.get_scheduler("linear", parameters(), warmup, total)


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_led_by_a_metric_is_made_by_name_and_copied(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = public.get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=10)
    copied = pickle.loads(pickle.dumps(schedule))
    assert copied.get_last_lr() == copy.deepcopy(schedule).get_last_lr() == [0.1]
    given = public.get_scheduler(name, optimizer, scheduler_specific_kwargs={"factor": 0.5})
    assert given.factor == 0.5
