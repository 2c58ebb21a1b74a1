"""AdamW with a dtype for each average, for models that are trained in bf16 throughout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.optim.optimizers.elementwise import Batch, ElementwiseOptimizer, State, zeros
from windlass.optim.optimizers.options import recipe_of
from windlass.optim.optimizers.rounding import add_compensated_, add_stochastically_, seed_of


class AnyPrecisionAdamW(ElementwiseOptimizer):
    """AdamW (arXiv:1711.05101) whose averages may be stored in a lower precision; updates are computed in fp32.

    Args:
        params, lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        use_kahan_summation: keep what rounding of half-precision weights loses, and add it to the next update.
        bf16_stochastic_round: round bf16 weights at random, unbiased; no memory is needed.
        momentum_dtype, variance_dtype, compensation_buffer_dtype: of the first moment, the second, and of what rounding
            lost.

    Attributes:
        keeps_small_updates: updates below the resolution of half-precision weights are not lost.
    """

    copied = ("keeps_small_updates", "_compensates", "_rounds", "_dtypes")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_kahan_summation: bool = False,
        bf16_stochastic_round: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.float32,
        compensation_buffer_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if use_kahan_summation and bf16_stochastic_round:
            raise ValueError(
                "use_kahan_summation=True and bf16_stochastic_round=True exclude each other: set one of them"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._compensates, self._rounds = use_kahan_summation, bf16_stochastic_round
        self.keeps_small_updates = use_kahan_summation or bf16_stochastic_round
        self._dtypes = {"exp_avg": momentum_dtype, "exp_avg_sq": variance_dtype}
        if use_kahan_summation:
            self._dtypes["compensation"] = compensation_buffer_dtype

    def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> State:
        return {"step": 0, **{name: zeros(parameter, dtype) for name, dtype in self._dtypes.items()}}

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        moments, squares = batch.column("exp_avg"), batch.column("exp_avg_sq")
        steps, (beta1, beta2) = batch.advance(), group["betas"]
        updates = []
        for weight, gradient, moment, square, step in zip(
            batch.weights, batch.gradients, moments, squares, steps, strict=True
        ):
            gradient = gradient.float()
            mean = moment.float().lerp_(gradient, 1 - beta1)
            variance = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            # `float()` of a tensor in fp32 is the tensor itself, which was changed in place.
            if mean is not moment:
                moment.copy_(mean)
            if variance is not square:
                square.copy_(variance)
            scale = (variance.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
            update = weight.float() * (-group["lr"] * group["weight_decay"])
            updates.append(update.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step)))
        self._add(batch, updates, steps, next(i for i, own in enumerate(self.param_groups) if own is group))

    def _add(self, batch: Batch, updates: list[Tensor], steps: list[int], group: int) -> None:
        if self._compensates:
            add_compensated_(batch.weights, batch.column("compensation"), updates)
            return
        rows = zip(batch.weights, updates, batch.parameters, batch.positions, steps, strict=True)
        for weight, update, parameter, position, step in rows:
            if self._rounds and weight.dtype == torch.bfloat16:
                add_stochastically_(weight, update, seed_of(parameter, group, position, step))
            else:
                weight.add_(update)  # in fp32, rounded once


anyprecision = recipe_of(AnyPrecisionAdamW)
