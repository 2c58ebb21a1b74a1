"""Adafactor (Shazeer & Stern, arXiv:1804.04235): second moments kept as one row and one column per matrix.

Torch's own always scales by the parameter's size and decays by its own step; scripts with a learning-rate schedule need
the form without either (`scale_parameter=False, relative_step=False`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.config.plan import OptimizerPlan
from windlass.optim.optimizers.options import Recipe, arguments, recipe_of
from windlass.optim.per_parameter import PerParameterOptimizer

_LOW = (torch.float16, torch.bfloat16)


def adafactor(plan: OptimizerPlan) -> Recipe:
    recipe = recipe_of(Adafactor, "clip_threshold", "decay_rate", "beta1", "scale_parameter")
    cls, options = recipe(plan)
    return cls, {"scale_parameter": False, "relative_step": False, **options}


class Adafactor(PerParameterOptimizer):
    """Adafactor with an outside learning rate, or with its own (`relative_step`).

    Args:
        params: parameters or groups.
        lr: outside learning rate; None with `relative_step`.
        eps: regularisers of the squared gradient and of the parameter's scale.
        clip_threshold: an update whose root mean square exceeds it is scaled down to it.
        decay_rate: second moments decay with `1 - step ** decay_rate`.
        beta1: decay of the first moment; None keeps none.
        weight_decay: decoupled, times the learning rate.
        scale_parameter: multiply the learning rate by the parameter's root mean square.
        relative_step: `min(1e-2, 1/sqrt(step))` as the learning rate.
        warmup_init: with `relative_step`, start from `1e-6 * step`.

    Half-precision parameters are updated in fp32 and rounded once.
    """

    elementwise = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if lr is not None and relative_step:
            raise ValueError(
                f"lr={lr} and relative_step=True exclude each other: set relative_step=False, or lr=None"
            )
        if lr is None and not relative_step:
            raise ValueError("relative_step=False needs a learning rate: set lr")
        if warmup_init and not relative_step:
            raise ValueError("warmup_init=True is a part of relative_step=True: set both or none")
        super().__init__(params, arguments(locals()))

    def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a `parameter` of `group` before its first update; rows and columns are whole on each rank."""
        dtype = torch.float32 if parameter.dtype in _LOW else parameter.dtype
        state: dict[str, Any] = {"step": 0}
        start_moments(state, parameter.detach(), group["beta1"] is not None, dtype)
        return state

    def rate_of(self, group: dict[str, Any]) -> float | Tensor:
        """The rate of the first parameter of `group` in its last update, for its present size if that counts."""
        first = group["params"][0]
        return _learning_rate(first.detach(), group, self.state[first]["step"])

    def apply(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight = parameter.float() if parameter.dtype in _LOW else parameter
        lr = _learning_rate(weight, group, state["step"])
        update = factored_update(grad, state, group, lr)
        if group["weight_decay"] != 0:
            # Not with `alpha=`: the rate may be a tensor on the device, and torch would read that number on the
            # host.
            weight.sub_(weight * (group["weight_decay"] * lr))
        weight.sub_(update)
        if weight is not parameter:
            parameter.copy_(weight)


def factored_update(grad: Tensor, state: dict[str, Any], group: dict[str, Any], lr: float | Tensor) -> Tensor:
    """Return what is subtracted from a weight besides its decay; its first call begins the moments in `state`."""
    beta1 = group.get("beta1")
    if state.keys().isdisjoint(("exp_avg_sq", "exp_avg_sq_row")):
        start_moments(state, grad, beta1 is not None)
    # As in transformers' Adafactor, the rate is in the first moment: it averages updates and not directions.
    update = clipped(preconditioned(grad, state, group), group).mul_(lr)
    if beta1 is None:
        return update
    first: Tensor = state["exp_avg"].mul_(beta1).add_(update, alpha=1 - beta1)
    return first


def start_moments(state: dict[str, Any], like: Tensor, first: bool, dtype: torch.dtype | None = None) -> None:
    """Set the moments of `preconditioned` to zero, for gradients like `like`; with `first` the first moment too, as
    "exp_avg".
    """
    if first:
        state["exp_avg"] = torch.zeros_like(like, dtype=dtype)
    if like.dim() >= 2:
        state["exp_avg_sq_row"] = like.new_zeros(like.shape[:-1], dtype=dtype)
        state["exp_avg_sq_col"] = like.new_zeros(like.shape[:-2] + like.shape[-1:], dtype=dtype)
    else:
        state["exp_avg_sq"] = torch.zeros_like(like, dtype=dtype)


def _learning_rate(weight: Tensor, group: dict[str, Any], step: int) -> float | Tensor:
    """A number, or with `scale_parameter` a scalar tensor on the device. No host sync."""
    lr = group["lr"]
    if group["relative_step"]:
        lr = min(1e-6 * step if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))
    if not group["scale_parameter"]:
        return float(lr)
    scaled: Tensor = rms(weight).clamp(min=group["eps"][1]) * lr
    return scaled


def preconditioned(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """The gradient over the root of its running second moment, shape of `grad`; moves that moment in `state`. `group`
    has `eps` and `decay_rate`.
    """
    # Section 7.2 of the paper. It is 0 in the first update, so that the moments need no correction of a bias.
    beta2 = 1.0 - math.pow(state["step"], group["decay_rate"])
    square = grad**2 + group["eps"][0]
    if grad.dim() < 2:
        moment: Tensor = state["exp_avg_sq"].mul_(beta2).add_(square, alpha=1.0 - beta2)
        return moment.rsqrt().mul_(grad)
    row = state["exp_avg_sq_row"].mul_(beta2).add_(square.mean(dim=-1), alpha=1.0 - beta2)
    column: Tensor = state["exp_avg_sq_col"].mul_(beta2).add_(square.mean(dim=-2), alpha=1.0 - beta2)
    # Algorithm 4 of the paper, V = R C / (1^T R), with means in the place of its sums: the sizes cancel out.
    row_part: Tensor = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return torch.mul(row_part, column.unsqueeze(-2).rsqrt()).mul_(grad)


def clipped(update: Tensor, group: dict[str, Any]) -> Tensor:
    """`update`, scaled down in place to a root mean square of `clip_threshold` if it exceeds that."""
    return update.div_((rms(update) / group["clip_threshold"]).clamp_(min=1.0))


def rms(tensor: Tensor) -> Tensor:
    """The root mean square of all elements, a scalar on the device."""
    # The norm, rather than the mean of squares: no second tensor of this size is made.
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm / math.sqrt(tensor.numel())
