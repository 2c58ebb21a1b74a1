"""The warning of updates that half-precision weights would lose."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.optim.helpers import heard
from torch import nn

from windlass.optim.optimizers.anyprecision import AnyPrecisionAdamW
from windlass.optim.optimizers.stable_adamw import StableAdamW
from windlass.optim.resolution import warn_of_lost_updates


def warnings_of(make: Any, dtype: torch.dtype, lr: float) -> list[str]:
    weight = nn.Parameter(torch.linspace(-1, 1, 101).to(dtype))
    with heard(logging.WARNING) as records:
        warn_of_lost_updates(make([weight], lr=lr))
    return [record.getMessage() for record in records]


@pytest.mark.parametrize(
    ("make", "dtype", "lr", "lost"),
    [
        (torch.optim.AdamW, torch.bfloat16, 1e-5, "updates of 99 % of them are"),
        (torch.optim.AdamW, torch.bfloat16, 1e-2, ""),
        (torch.optim.AdamW, torch.float32, 1e-5, ""),
        (torch.optim.SGD, torch.bfloat16, 1e-5, "1 trained parameters are bfloat16"),
        (torch.optim.SGD, torch.float32, 1e-5, ""),
        (StableAdamW, torch.bfloat16, 1e-5, ""),
        (AnyPrecisionAdamW, torch.bfloat16, 1e-5, "updates of 99 % of them are"),
    ],
)
def test_what_is_lost_is_reported(make: Any, dtype: torch.dtype, lr: float, lost: str) -> None:
    said = warnings_of(make, dtype, lr)
    assert len(said) == bool(lost)
    assert all(lost in message for message in said)


@pytest.mark.parametrize("option", ["use_kahan_summation", "bf16_stochastic_round"])
def test_no_warning_if_rounding_is_careful(option: str) -> None:
    assert not warnings_of(
        lambda held, lr: AnyPrecisionAdamW(held, lr=lr, **{option: True}), torch.bfloat16, 1e-5
    )


def test_the_size_of_a_lost_update() -> None:
    weight = torch.ones(1, dtype=torch.bfloat16)
    assert torch.equal(weight + 0.0038, weight)
    assert not torch.equal(weight + 0.0040, weight)
    assert "smaller than about 0.0039 of a weight" in warnings_of(torch.optim.SGD, torch.bfloat16, 1e-5)[0]


def test_a_schedule_that_warms_up_is_not_taken_for_the_learning_rate() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    with heard(logging.WARNING) as records:
        warn_of_lost_updates(optimizer)
    assert not records
