"""GaLore with AdamW whose moments are in 8 bits (arXiv:2403.03507; arXiv:2110.02861)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from windlass.config.plan import OptimizerPlan
from windlass.dist.sharded import whole
from windlass.optim.eight_bits import SMALLEST, dequantise, quantise
from windlass.optim.optimizers.galore_adamw import GaLoreAdamW, adam_direction
from windlass.optim.optimizers.low_rank import low_rank_options
from windlass.optim.optimizers.options import Recipe

_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


def galore_adamw_8bit(plan: OptimizerPlan) -> Recipe:
    options = low_rank_options(plan)
    return GaLoreAdamW8bit, {"lr": plan.learning_rate, "betas": plan.betas, "eps": plan.epsilon, **options}


class GaLoreAdamW8bit(GaLoreAdamW):
    """As `GaLoreAdamW`, with moments in blocks of 8-bit numbers; those of fewer than 4,096 numbers stay in fp32.

    The quantisation is plain PyTorch, so it runs on every device.
    """

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
