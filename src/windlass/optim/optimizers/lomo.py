"""LOMO (Lv et al., arXiv:2306.09782): SGD whose updates are applied in the backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.optim.optimizers.options import arguments, recipe_of
from windlass.optim.per_parameter import PerParameterOptimizer, move


class Lomo(PerParameterOptimizer):
    """`p -= lr * grad`, without any state.

    Args:
        weight_decay: decoupled, times the learning rate.
        in_backward: False keeps all gradients for `step`.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, weight_decay: float = 0.0, in_backward: bool = True
    ) -> None:
        super().__init__(params, arguments(locals()))

    def apply(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        move(parameter, grad * group["lr"], group["weight_decay"] * group["lr"])


lomo = recipe_of(Lomo)
