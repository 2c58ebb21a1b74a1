"""GrokAdamW: AdamW on gradients to which their slow average is added (Grokfast, Lee et al., arXiv:2405.20233)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.optim.optimizers.elementwise import (
    Batch,
    ElementwiseOptimizer,
    State,
    average_,
    average_squares_,
    decay_,
    zeros,
)
from windlass.optim.optimizers.options import arguments, recipe_of


class GrokAdamW(ElementwiseOptimizer):
    """AdamW with the gradient `g + lamb * e`, where `e = alpha * e + (1 - alpha) * g`.

    Args:
        params, lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        alpha_init: decay of the slow average. A callback may set `grokking_signal` of a group (0 at first): then alpha
            is `alpha_init * exp(-grokking_signal_decay_rate * grokking_signal)`.
        lamb: the weight of the slow average.
        gamma: the first moment of the i-th parameter of a group decays with `beta1 * (1 - gamma) ** i`.
        grokking_signal_decay_rate: see `alpha_init`.
        gradient_clipping: the gradient of each tensor is clipped to this norm; 0 disables it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        alpha_init: float = 0.98,
        lamb: float = 2.0,
        gamma: float = 0.1,
        grokking_signal_decay_rate: float = 0.1,
        gradient_clipping: float = 1.0,
    ) -> None:
        if not 0 <= alpha_init <= 1:
            raise ValueError(f"alpha_init={alpha_init} must be between 0 and 1")
        super().__init__(params, {**arguments(locals()), "grokking_signal": 0.0})

    def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> State:
        return {"step": 0, **{name: zeros(parameter) for name in ("exp_avg", "exp_avg_sq", "grok_ema")}}

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        moments, squares, slow = (batch.column(name) for name in ("exp_avg", "exp_avg_sq", "grok_ema"))
        steps, (beta1, beta2) = batch.advance(), group["betas"]
        gradients = _clipped(batch, group["gradient_clipping"])
        signal = group["grokking_signal_decay_rate"] * group["grokking_signal"]
        average_(slow, gradients, group["alpha_init"] * math.exp(-signal))
        gradients = list(torch._foreach_add(gradients, slow, alpha=group["lamb"]))
        decays = [beta1 * (1 - group["gamma"]) ** i for i in batch.positions]
        torch._foreach_mul_(moments, decays)
        torch._foreach_add_(moments, torch._foreach_mul(gradients, [1 - decay for decay in decays]))
        average_squares_(squares, gradients, beta2)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_add_(scales, group["eps"])
        updates = torch._foreach_div(moments, scales)
        torch._foreach_mul_(
            updates, [-math.sqrt(1 - beta2**step) / (1 - beta1**step) * group["lr"] for step in steps]
        )
        decay_(batch.weights, group["lr"] * group["weight_decay"])
        torch._foreach_add_(batch.weights, updates)


def _clipped(batch: Batch, limit: float) -> list[Tensor]:
    """The gradients, each with at most this norm; new tensors if there is a limit."""
    if limit <= 0 or not batch.gradients:
        return batch.gradients
    squares = batch.sums(torch._foreach_mul(batch.gradients, batch.gradients))
    # The formula of `torch.nn.utils.clip_grad_norm_`, with its 1e-6.
    factors = [(limit / (square.sqrt() + 1e-6)).clamp(max=1.0) for square in squares]
    return [gradient * factor for gradient, factor in zip(batch.gradients, factors, strict=True)]


grokadamw = recipe_of(GrokAdamW)
