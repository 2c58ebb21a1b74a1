"""AdamW with a dtype for each average: against torch's, and in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim.helpers import assert_same, five_steps

from windlass.config.plan import OptimizerPlan
from windlass.optim.optimizers.anyprecision import AnyPrecisionAdamW, anyprecision


def test_in_fp32_it_is_adamw() -> None:
    common = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    assert_same(
        five_steps(lambda p: AnyPrecisionAdamW(p, **common)),
        five_steps(lambda p: torch.optim.AdamW(p, **common)),
    )


@pytest.mark.parametrize("options", [{"use_kahan_summation": True}, {"bf16_stochastic_round": True}])
def test_small_updates_of_bf16_weights_are_not_lost(options: dict[str, Any]) -> None:
    after = {}
    for name, chosen in (("plain", {}), ("careful", options)):
        weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = AnyPrecisionAdamW([weight], lr=1e-4, weight_decay=0.1, **chosen)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        after[name] = weight.detach().float().mean().item()
    assert after["plain"] == 1.0
    assert after["careful"] == pytest.approx(1 - 100 * 1e-4 * 1.1, abs=2.0**-9)


@pytest.mark.parametrize("name", ["momentum_dtype", "variance_dtype"])
def test_an_average_in_less_precision_is_that_of_adamw_rounded(name: str) -> None:
    less: dict[str, Any] = {name: torch.bfloat16}
    ours = five_steps(lambda p: AnyPrecisionAdamW(p, lr=0.01, weight_decay=0.1, **less))
    for mine, other in zip(
        ours, five_steps(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=5 * 0.01 * 2.0**-7)


def test_dtypes_are_those_asked_for() -> None:
    plan = OptimizerPlan(
        name="adamw_anyprecision", options={"momentum_dtype": "bfloat16", "use_kahan_summation": "True"}
    )
    cls, kwargs = anyprecision(plan)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = cls([weight], **kwargs)
    optimizer.step()
    state = optimizer.state[weight]
    found = {name: state[name].dtype for name in ("exp_avg", "exp_avg_sq", "compensation")}
    assert list(found.values()) == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_two_ways_of_rounding_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        AnyPrecisionAdamW(
            [torch.nn.Parameter(torch.ones(1))], use_kahan_summation=True, bf16_stochastic_round=True
        )


def test_parameters_of_different_groups_are_rounded_by_different_random_numbers() -> None:
    weights = [torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = AnyPrecisionAdamW(
        [{"params": [weight]} for weight in weights], lr=1e-4, bf16_stochastic_round=True
    )
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(*weights)
