"""Lion against the paper's algorithm 2."""

from __future__ import annotations

import torch
from tests.optim.helpers import assert_same, five_steps
from torch import nn

from windlass.optim.optimizers.lion import Lion


class Paper(torch.optim.Optimizer):
    """The algorithm, line by line."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, betas: tuple[float, float], decay: float
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.betas, self.decay = betas, decay

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        (beta1, beta2), lr = self.betas, self.param_groups[0]["lr"]
        for theta in self.param_groups[0]["params"]:
            g, m = theta.grad, self.state[theta].get("m", torch.zeros_like(theta))
            c = beta1 * m + (1 - beta1) * g
            theta.sub_(lr * (c.sign() + self.decay * theta))
            self.state[theta]["m"] = beta2 * m + (1 - beta2) * g


def test_five_updates_equal_the_papers() -> None:
    ours = five_steps(lambda p: Lion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1))
    assert_same(ours, five_steps(lambda p: Paper(p, 0.01, (0.9, 0.99), 0.1)))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    optimizer = Lion([used, unused], lr=0.1)
    optimizer.step()
    assert unused.tolist() == [1, 1]
    assert unused not in optimizer.state
