"""AdEMAMix against the paper's algorithm 1, with and without its schedulers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.optim.helpers import assert_same, five_steps
from torch import nn

from windlass.config.plan import OptimizerPlan
from windlass.optim.optimizers.ademamix import AdEMAMix, ademamix


class Paper(torch.optim.Optimizer):
    """The algorithm, line by line."""

    def __init__(self, params: list[nn.Parameter], t_alpha: int | None, t_beta3: int | None) -> None:
        super().__init__(params, {"lr": 0.01})
        self.t_alpha, self.t_beta3, self.t = t_alpha, t_beta3, 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.t += 1
        t, b1, b2, b3, alpha = self.t, 0.9, 0.99, 0.999, 5.0
        if self.t_alpha:
            alpha = min(t * alpha / self.t_alpha, alpha)
        if self.t_beta3:
            first, last, mu = math.log(b1), math.log(b3), t / self.t_beta3
            b3 = min(math.exp(first * last / ((1 - mu) * last + mu * first)), b3)
        for theta in self.param_groups[0]["params"]:
            g, state = theta.grad, self.state[theta]
            m1, m2, v = (state.get(key, torch.zeros_like(theta)) for key in ("m1", "m2", "v"))
            m1, m2, v = b1 * m1 + (1 - b1) * g, b3 * m2 + (1 - b3) * g, b2 * v + (1 - b2) * g**2
            update = (m1 / (1 - b1**t) + alpha * m2) / ((v / (1 - b2**t)).sqrt() + 1e-8)
            theta.sub_(0.01 * (update + 0.1 * theta))
            state.update(m1=m1, m2=m2, v=v)


@pytest.mark.parametrize(("t_alpha", "t_beta3"), [(None, None), (3, None), (10, 10), (None, 3)])
def test_five_updates_equal_the_papers(t_alpha: int | None, t_beta3: int | None) -> None:
    options: dict[str, Any] = {"betas": (0.9, 0.99, 0.999), "weight_decay": 0.1, "lr": 0.01}
    ours = five_steps(lambda p: AdEMAMix(p, t_alpha=t_alpha, t_beta3=t_beta3, **options))
    assert_same(ours, five_steps(lambda p: Paper(p, t_alpha, t_beta3)))


def test_its_options_come_from_optim_args_and_else_from_adams() -> None:
    _, kwargs = ademamix(OptimizerPlan(name="ademamix", options={"beta3": "0.999", "t_alpha": "100"}))
    assert kwargs == {
        "lr": 5e-5, "betas": (0.9, 0.999, 0.999), "alpha": 5.0, "eps": 1e-8, "t_alpha": 100
    }  # fmt: skip


def test_a_beta1_of_0_is_allowed_where_no_half_life_rises_from_it() -> None:
    _, options = ademamix(OptimizerPlan("ademamix", betas=(0.0, 0.99)))
    assert options["betas"] == (0.0, 0.99, 0.9999)
