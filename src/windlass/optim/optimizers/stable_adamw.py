"""StableAdamW (Wortsman et al., arXiv:2304.13013): AdamW with Adafactor's clipping of updates, for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.dist.sharded import local
from windlass.optim.optimizers.elementwise import Batch, ElementwiseOptimizer, State, zeros
from windlass.optim.optimizers.options import arguments, recipe_of
from windlass.optim.optimizers.rounding import add_compensated_

_LOW = (torch.float16, torch.bfloat16)


class StableAdamW(ElementwiseOptimizer):
    """AdamW whose learning rate for a tensor is divided by `max(1, sqrt(mean(g ** 2 / max(v, eps ** 2))))`, so that
    gradients that grew suddenly make no larger update than usual.

    Args:
        params, lr, eps: as of `torch.optim.AdamW`.
        betas: decay of the first and second moment, corrected as the paper's beta-hat.
        weight_decay: decoupled, times the learning rate of the tensor.
        decouple_lr: weight decay times `learning rate / max_lr` instead.
        max_lr: the highest rate of the schedule, for `decouple_lr`; by default `lr`.
        kahan_sum: compensate what rounding of half-precision weights loses; None: for these weights.

    Attributes:
        keeps_small_updates: updates below the resolution of half-precision weights are not lost.
    """

    elementwise = False
    copied = ("keeps_small_updates",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        decouple_lr: bool = False,
        max_lr: float | None = None,
        kahan_sum: bool | None = None,
    ) -> None:
        super().__init__(params, {**arguments(locals()), "max_lr": lr if max_lr is None else max_lr})
        # None compensates all half-precision weights, and no others can lose updates.
        self.keeps_small_updates = kahan_sum is not False

    def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> State:
        names = ["exp_avg", "exp_avg_sq"]
        if parameter.dtype in _LOW and group["kahan_sum"] is not False:
            names.append("compensation")
        return {"step": 0, **{name: zeros(parameter) for name in names}}

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        moments, squares, gradients = batch.column("exp_avg"), batch.column("exp_avg_sq"), batch.gradients
        steps, (beta1, beta2), eps = batch.advance(), group["betas"], group["eps"]
        torch._foreach_mul_(moments, [_debiased(beta1, step) for step in steps])
        torch._foreach_add_(
            moments, torch._foreach_mul(gradients, [1 - _debiased(beta1, step) for step in steps])
        )
        torch._foreach_mul_(squares, [_debiased(beta2, step) for step in steps])
        # Kept for the ratio below, which needs g**2 beside its average.
        grown = torch._foreach_mul(gradients, gradients)
        torch._foreach_add_(
            squares, torch._foreach_mul(grown, [1 - _debiased(beta2, step) for step in steps])
        )
        # In fp32, because eps**2 underflows in half precision.
        ratios = [g.float() / s.float().clamp(min=eps**2) for g, s in zip(grown, squares, strict=True)]
        # Not of `ratios`, which are of this rank's parts.
        counts = [p.numel() * (2 if p.is_complex() else 1) for p in batch.parameters]
        means = [total / count for total, count in zip(batch.sums(ratios), counts, strict=True)]
        rates = [group["lr"] / mean.sqrt().clamp(min=1.0) for mean in means]
        base = group["max_lr"] if group["decouple_lr"] else 1.0
        rows = zip(batch.weights, moments, squares, rates, batch.states, strict=True)
        for weight, moment, square, rate, state in rows:
            if group["weight_decay"] != 0:
                weight.mul_(1 - rate / base * group["weight_decay"])
            update = (moment / square.sqrt().add_(eps)).mul_(-rate)
            if "compensation" in state:
                add_compensated_([weight], [local(state["compensation"])], [update])
            else:
                weight.add_(update)


def _debiased(beta: float, step: int) -> float:
    """`beta * (1 - beta ** (step - 1)) / (1 - beta ** step)`: an average with this decay needs no correction."""
    return beta * (1 - beta ** (step - 1)) / (1 - beta**step)


stable_adamw = recipe_of(StableAdamW)
