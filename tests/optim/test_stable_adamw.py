"""StableAdamW against torch-optimi's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim.helpers import assert_same, five_steps

from windlass.config.plan import OptimizerPlan
from windlass.optim.optimizers.stable_adamw import StableAdamW, stable_adamw


@pytest.mark.parametrize("options", [{}, {"decouple_lr": True, "max_lr": 0.1}])
def test_five_updates_equal_torch_optimi(options: dict[str, Any]) -> None:
    optimi = pytest.importorskip("optimi")
    common = {"lr": 0.05, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-6, **options}
    assert_same(
        five_steps(lambda p: StableAdamW(p, **common)),
        five_steps(lambda p: optimi.StableAdamW(p, foreach=False, triton=False, **common)),
    )


def test_half_precision_is_compensated_unless_told_otherwise() -> None:
    start = {}
    for kahan in (None, False):
        weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = StableAdamW([weight], lr=1e-4, weight_decay=0.0, kahan_sum=kahan)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        start[kahan] = weight.detach().float().mean().item()
    assert start[False] == 1.0  # each update is below the resolution of 1
    assert start[None] == pytest.approx(0.99, abs=0.002)


def test_decoupled_decay_refers_to_the_learning_rate_argument() -> None:
    plan = OptimizerPlan(name="stable_adamw", learning_rate=0.1, options={"decouple_lr": "true"})
    cls, options = stable_adamw(plan)
    assert cls([torch.nn.Parameter(torch.ones(2))], **options).param_groups[0]["max_lr"] == 0.1
