"""GaLore with AdamW (Zhao et al., arXiv:2403.03507, algorithm 2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.optim.optimizers.low_rank import LowRankOptimizer
from windlass.optim.optimizers.options import arguments, recipe_of


class GaLoreAdamW(LowRankOptimizer):
    """AdamW whose moments are those of projected gradients; for the arguments of the projection see `LowRankOptimizer`.

    Args:
        betas: as in `torch.optim.AdamW`; moments are divided by `1 - beta ** step`.
        eps: as in `torch.optim.AdamW`.
        weight_decay: decoupled, times the learning rate.

    With the smaller side m of a matrix projected, its state has r * (m + 2n) numbers instead of 2mn.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        in_backward: bool = False,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def displacement(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return adam_direction(grad, state, group).mul_(group["lr"])


def adam_direction(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """`m_hat / (sqrt(v_hat) + eps)`, of the shape of `grad`; moves the moments in `state`."""
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
    (beta1, beta2), step = group["betas"], state["step"]
    first = state["exp_avg"].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (second.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    return torch.div(first, denominator).div_(1 - beta1**step)


galore_adamw = recipe_of(GaLoreAdamW)
