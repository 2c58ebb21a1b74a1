"""GaLore with AdamW whose moments are in 8 bits (arXiv:2403.03507; arXiv:2110.02861)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.config.plan import OptimizerPlan
from windlass.dist.sharded import whole
from windlass.optim.eight_bits import SMALLEST, dequantise, quantise
from windlass.optim.optimizers.galore_adamw import adam_direction
from windlass.optim.optimizers.low_rank import LowRankOptimizer, low_rank_options

_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


def galore_adamw_8bit(plan: OptimizerPlan) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    options = low_rank_options(plan)
    return GaLoreAdamW8bit, {"lr": plan.learning_rate, "betas": plan.betas, "eps": plan.epsilon, **options}


class GaLoreAdamW8bit(LowRankOptimizer):
    """As `GaLoreAdamW`, with moments in blocks of 8-bit numbers; those of fewer than 4,096 numbers stay in fp32.

    The quantisation is plain PyTorch, so it runs on every device.
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
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, rank, update_proj_gap, scale, proj_type, in_backward)

    def has_whole_state(self, group: dict[str, Any]) -> bool:
        return True

    def displacement(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        grad = whole(grad)  # blocks of all of it
        moments: dict[str, Any] = {"step": state["step"]}
        for key, signed in _MOMENTS:
            if f"{key}_scale" in state:
                moments[key] = dequantise(state[key], state[f"{key}_scale"], signed).to(grad.dtype)
            elif key in state:
                moments[key] = state[key]
        direction = adam_direction(grad, moments, group)
        for key, signed in _MOMENTS:
            if grad.numel() < SMALLEST:
                state[key] = moments[key]
            else:
                state[key], state[f"{key}_scale"] = quantise(moments[key], signed)
        return direction.mul_(group["lr"])
