"""AdEMAMix (Pagliardini et al., arXiv:2409.03137): AdamW with a second, slow average of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ConfigError, Problem
from windlass.optim.optimizers.elementwise import Batch, ElementwiseOptimizer, State, average_squares_, zeros
from windlass.optim.optimizers.options import Recipe, arguments, read_options

OPTIONS: dict[str, type] = {
    **dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float),
    **dict.fromkeys(("t_alpha", "t_beta3"), int),
}


def ademamix(plan: OptimizerPlan) -> Recipe:
    return AdEMAMix, {"lr": plan.learning_rate, **ademamix_options(plan)}


def ademamix_options(plan: OptimizerPlan) -> dict[str, Any]:
    """The keyword arguments that `optim_args` and the arguments for Adam come to."""
    given = read_options(plan.name, plan.options, OPTIONS)
    betas = (given.pop("beta1", plan.betas[0]), given.pop("beta2", plan.betas[1]), given.pop("beta3", 0.9999))
    if "t_beta3" in given and not (betas[0] and betas[2]):
        fix = "needs a beta1 and a beta3 above 0, between whose half-lives the slow average's rises"
        raise ConfigError(Problem("optim_args.t_beta3", given["t_beta3"], fix))
    return {"betas": betas, "alpha": 5.0, "eps": plan.epsilon, **given}


class AdEMAMix(ElementwiseOptimizer):
    """`w -= lr * ((m1 / c1 + alpha * m2) / (sqrt(v / c2) + eps) + weight_decay * w)`, with Adam's corrections c1, c2.

    Args:
        params, lr, eps, weight_decay: as of `torch.optim.AdamW`.
        betas: decay of the fast average `m1`, of the squares `v` and of the slow average `m2`.
        alpha: the weight of the slow average.
        t_alpha: updates in which `alpha` rises linearly from 0; None: it does not.
        t_beta3: updates in which the slow average's half-life rises linearly from that of beta1; None: it does not.

    Averages have the dtype of their parameter, at least fp32.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> State:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        names = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
        return {"step": 0, **{name: zeros(parameter, dtype) for name in names}}

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        fast, slow = batch.column("exp_avg"), batch.column("exp_avg_slow")
        squares, steps = batch.column("exp_avg_sq"), batch.advance()
        beta1, beta2, _ = group["betas"]
        rates = [_slow_decay(step, group) for step in steps]
        # Averages may be wider than gradients, and torch's functions of lists want one dtype.
        gradients = [g.to(f.dtype) for g, f in zip(batch.gradients, fast, strict=True)]
        torch._foreach_lerp_(fast, gradients, 1 - beta1)
        torch._foreach_mul_(slow, rates)
        torch._foreach_add_(slow, torch._foreach_mul(gradients, [1 - rate for rate in rates]))
        average_squares_(squares, gradients, beta2)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_div_(scales, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(scales, group["eps"])
        updates = torch._foreach_mul(slow, [_slow_weight(step, group) for step in steps])
        torch._foreach_add_(updates, torch._foreach_div(fast, [1 - beta1**step for step in steps]))
        torch._foreach_div_(updates, scales)
        if group["weight_decay"] != 0:
            torch._foreach_add_(updates, batch.weights, alpha=group["weight_decay"])
        torch._foreach_add_(batch.weights, updates, alpha=-group["lr"])


def _slow_weight(step: int, group: Mapping[str, Any]) -> float:
    """`alpha` in this update, after the paper's scheduler."""
    alpha, rise = float(group["alpha"]), group["t_alpha"]
    return alpha if rise is None else min(step * alpha / rise, alpha)


def _slow_decay(step: int, group: Mapping[str, Any]) -> float:
    """`beta3` in this update: the interpolation of ln(0.5) / ln(beta), the half-life, of the paper's appendix A.1."""
    beta1, _, beta3 = group["betas"]
    rise = group["t_beta3"]
    if rise is None or step >= rise:
        return float(beta3)
    start, end, share = math.log(beta1), math.log(beta3), step / rise
    return min(math.exp(start * end / ((1 - share) * end + share * start)), float(beta3))
