"""Lion (Chen et al., arXiv:2302.06675): the sign of an interpolation of momentum and gradient. One moment is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.optim.optimizers.elementwise import Batch, ElementwiseOptimizer, State, average_, decay_, zeros
from windlass.optim.optimizers.options import arguments, recipe_of


class Lion(ElementwiseOptimizer):
    """`w -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)`, then `m = beta2 * m + (1 - beta2) * g`.

    Args:
        lr: learning rate; the paper recommends 3 to 10 times less than AdamW's.
        betas: the weight of momentum in the update, and its decay.
        weight_decay: decoupled, times the learning rate.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> State:
        return {"exp_avg": zeros(parameter)}

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        moments, (beta1, beta2) = batch.column("exp_avg"), group["betas"]
        direction = torch._foreach_mul(moments, beta1)
        torch._foreach_add_(direction, batch.gradients, alpha=1 - beta1)
        torch._foreach_sign_(direction)
        decay_(batch.weights, group["lr"] * group["weight_decay"])
        torch._foreach_add_(batch.weights, direction, alpha=-group["lr"])
        # After the update, which uses the momentum of the gradients before this one.
        average_(moments, batch.gradients, beta2)


lion = recipe_of(Lion)
