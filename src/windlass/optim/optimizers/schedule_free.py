"""Schedule-free optimizers (Defazio et al., arXiv:2405.15682): an average of the weights in place of a schedule.

Three sequences: `z` takes the steps, `x` is a weighted average of `z`, and gradients are computed at
`y = (1 - beta1) * z + beta1 * x`. While training, parameters hold `y`; `eval()` puts `x` into them, `train()` puts `y`
back, to the bit: until then `y` is kept, which takes the memory of one more copy of the weights. Checkpoints of both
modes continue exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.core.errors import ModelError
from windlass.dist.sharded import locals_of
from windlass.optim.optimizers.elementwise import Batch, ElementwiseOptimizer, State, average_squares_, zeros
from windlass.optim.optimizers.options import arguments, recipe_of


class ScheduleFree(ElementwiseOptimizer):
    """What the three have in common; a subclass defines `directions`.

    Groups have `k` (the updates made), `train_mode` (False after `eval()`), and the sums of the average's weights.
    Raises ValueError if a group gives `x` no weight in `y`: `x` is computed from `y` and `z` then, and could not be.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        counters = {"k": 0, "train_mode": True, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0}
        super().__init__(params, defaults | counters)
        for group in self.param_groups:
            if not 0 < _beta1(group) < 1:
                name = "momentum" if "momentum" in group else "betas"
                what = "" if name == "momentum" else ": the first (adam_beta1)"
                raise ValueError(f"{name}={group[name]}{what} must be above 0 and below 1")

    def train(self) -> None:
        """Put `y`, at which gradients are computed, into the parameters."""
        self._switch(to_train=True)

    def eval(self) -> None:
        """Put the averaged weights `x` into the parameters: for evaluation, and as the result of training."""
        self._switch(to_train=False)

    @torch.no_grad()
    def _switch(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == to_train:
                continue
            group["train_mode"] = to_train
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if to_train and "y" in state:
                    parameter.copy_(state.pop("y"))
                elif not to_train and "z" in state:
                    state["y"] = parameter.detach().clone()
                    weight, z = locals_of([parameter, state["z"]])
                    # x = y / beta1 + (1 - 1 / beta1) * z, from the definition of y.
                    weight.lerp_(z, 1 - 1 / _beta1(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. `closure`, if given, recomputes and returns the loss."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise ModelError(
                f"{type(self).__name__} was in evaluation mode at an update: call optimizer.train() after "
                "optimizer.eval()"
            )
        return super().step(closure)

    def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> State:
        squares = {"exp_avg_sq": zeros(parameter)} if "betas" in group else {}  # without in the form of SGD
        return {"z": parameter.detach().clone(), **squares}

    def directions(self, batch: Batch, group: dict[str, Any], step: int) -> tuple[list[Tensor], float]:
        """What `z` moves against in update `step` (from 1), as new tensors, and the learning rate."""
        raise NotImplementedError

    def update_group(self, batch: Batch, group: dict[str, Any]) -> None:
        """Apply one update to a group. One without gradients is counted too: weights of the average depend on it."""
        step = group["k"] = group["k"] + 1
        directions, lr = self.directions(batch, group, step)
        group["scheduled_lr"], group["lr_max"] = lr, max(lr, group["lr_max"])
        weight = step ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] += weight
        # The sum is 0 as long as the rate is: in a silent phase, or at the start of a schedule's warm-up.
        share = weight / group["weight_sum"] if group["weight_sum"] else 0.0
        if not batch.weights:
            return
        if group["weight_decay"] != 0:
            # `directions` are new tensors, so gradients are not changed by this.
            torch._foreach_add_(directions, batch.weights, alpha=group["weight_decay"])
        # y moves as (1 - beta1) z + beta1 x do, without x being computed.
        z = batch.column("z")
        torch._foreach_lerp_(batch.weights, z, share)
        torch._foreach_add_(batch.weights, directions, alpha=lr * (_beta1(group) * (1 - share) - 1))
        torch._foreach_sub_(z, directions, alpha=lr)


class ScheduleFreeAdamW(ScheduleFree):
    """AdamW's second moment, and the average in place of its first.

    Args:
        params, lr, eps: as of `torch.optim.AdamW`.
        betas: the weight of `x` in `y`, and the decay of the second moment.
        weight_decay: times the learning rate, of `y`.
        warmup_steps: updates in which the learning rate rises linearly.
        r, weight_lr_power: update `k` has the weight `k ** r * max_lr ** weight_lr_power` in the average.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def directions(self, batch: Batch, group: dict[str, Any], step: int) -> tuple[list[Tensor], float]:
        return _adam_directions(batch, group, step), group["lr"] * _warmed(group, step)


class ScheduleFreeRAdam(ScheduleFree):
    """As `ScheduleFreeAdamW`, with RAdam's rectified learning rate (arXiv:1908.03265) in place of a warm-up.

    Args:
        params, lr, betas, eps, weight_decay, r, weight_lr_power: as there.
        silent_sgd_phase: make no update before the variance can be estimated (about 5 updates); False: plain SGD's.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        silent_sgd_phase: bool = True,
    ) -> None:
        super().__init__(params, arguments(locals()))
        for group in self.param_groups:
            if group["silent_sgd_phase"] and _longest(group["betas"][1]) <= 4:
                raise ValueError(
                    f"betas={group['betas']}: with silent_sgd_phase=True the second (adam_beta2) must be above 0.6, or "
                    "no update is ever made"
                )

    def directions(self, batch: Batch, group: dict[str, Any], step: int) -> tuple[list[Tensor], float]:
        decay = group["betas"][1]
        # rho_inf and rho_t of algorithm 2 in the paper; the ratio below is the square of its rectification term.
        longest = _longest(decay)
        length = longest - 2 * step * decay**step / (1 - decay**step)
        # Before the branch: the second moment is averaged in the phase of SGD too.
        adam = _adam_directions(batch, group, step)
        if length <= 4:
            factor = 0.0 if group["silent_sgd_phase"] else 1.0
            # Copies, because weight decay is added to the directions in place.
            return [gradient.clone() for gradient in batch.gradients], group["lr"] * factor
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return adam, group["lr"] * math.sqrt(ratio)


class ScheduleFreeSGD(ScheduleFree):
    """SGD whose momentum is the average.

    Args:
        params, lr, weight_decay, warmup_steps, r, weight_lr_power: as of `ScheduleFreeAdamW`.
        momentum: the weight of `x` in `y`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def directions(self, batch: Batch, group: dict[str, Any], step: int) -> tuple[list[Tensor], float]:
        return [gradient.clone() for gradient in batch.gradients], group["lr"] * _warmed(group, step)


def _adam_directions(batch: Batch, group: Mapping[str, Any], step: int) -> list[Tensor]:
    squares, decay = batch.column("exp_avg_sq"), group["betas"][1]
    if not squares:
        return []
    average_squares_(squares, batch.gradients, decay)
    scales = torch._foreach_div(squares, 1 - decay**step)
    torch._foreach_sqrt_(scales)
    torch._foreach_add_(scales, group["eps"])
    return list(torch._foreach_div(batch.gradients, scales))


def _longest(decay: float) -> float:
    """The length, in updates, of the average that a decay of the second moment comes to."""
    return 2 / (1 - decay) - 1


def _warmed(group: Mapping[str, Any], step: int) -> float:
    return min(step / group["warmup_steps"], 1.0) if group["warmup_steps"] else 1.0


def _beta1(group: Mapping[str, Any]) -> float:
    return float(group["momentum"] if "momentum" in group else group["betas"][0])


schedule_free_adamw = recipe_of(ScheduleFreeAdamW)
schedule_free_radam = recipe_of(ScheduleFreeRAdam)
schedule_free_sgd = recipe_of(ScheduleFreeSGD)
