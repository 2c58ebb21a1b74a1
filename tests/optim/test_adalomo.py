"""AdaLomo: against its algorithm, written for one parameter at a time."""

from __future__ import annotations

import pytest
import torch
from tests.optim.helpers import five_steps
from torch import Tensor, nn

from windlass.optim.optimizers.adalomo import AdaLomo


class Reference(torch.optim.Optimizer):
    """Algorithm 1 of arXiv:2310.10195, with weight decay as in the authors' code."""

    def __init__(self, params: list[nn.Parameter], decay: float) -> None:
        super().__init__(params, {"decay": decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                _move(parameter, self.state[parameter], group["decay"])


def _move(parameter: Tensor, state: dict[str, Tensor | int], decay: float) -> None:
    assert parameter.grad is not None
    state["step"] = step = int(state.get("step", 0)) + 1
    beta, square = 1 - step**-0.8, parameter.grad**2 + 1e-30
    means = {"row": square.mean(-1), "column": square.mean(-2)} if square.dim() > 1 else {"all": square}
    for name, mean in means.items():
        state[name] = beta * state.get(name, torch.zeros_like(mean)) + (1 - beta) * mean
    if square.dim() > 1:
        row, column = torch.as_tensor(state["row"]), torch.as_tensor(state["column"])
        second = row.unsqueeze(-1) * column.unsqueeze(-2) / row.mean(-1)[..., None, None]
    else:
        second = torch.as_tensor(state["all"])
    update = parameter.grad / second.sqrt()
    update /= update.square().mean().sqrt().clamp(min=1.0)
    rate = 1e-3 * parameter.square().mean().sqrt().clamp(min=1e-3)
    parameter.copy_(parameter - rate * decay * parameter - rate * update)


@pytest.mark.parametrize("decay", [0.0, 3.0])
def test_five_updates_are_those_of_the_algorithm(decay: float) -> None:
    ours = five_steps(lambda p: AdaLomo(p, weight_decay=decay), torch.float64)
    for mine, other in zip(ours, five_steps(lambda p: Reference(p, decay), torch.float64), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_it_updates_in_the_backward_unless_asked_otherwise() -> None:
    held = [nn.Parameter(torch.ones(2))]
    assert AdaLomo(held).in_backward
    assert not AdaLomo(held, in_backward=False).in_backward
