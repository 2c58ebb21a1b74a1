"""AdaLomo (Lv et al., arXiv:2310.10195): factored second moments and normalised updates, applied in the backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.dist.sharded import whole
from windlass.optim.optimizers.adafactor import factored_update, rms
from windlass.optim.optimizers.options import arguments, recipe_of
from windlass.optim.per_parameter import PerParameterOptimizer, move


class AdaLomo(PerParameterOptimizer):
    """One row and one column of second moments per matrix; each update is clipped and scaled by its parameter's size.

    Args:
        eps: what is added to squared gradients, and the least size of a parameter.
        clip_threshold: an update whose root mean square exceeds it is scaled down to it.
        decay_rate: second moments decay with `1 - step ** decay_rate`.
        weight_decay: decoupled, times the learning rate and the parameter's size.
        in_backward: False keeps all gradients for `step`.
    """

    elementwise = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        weight_decay: float = 0.0,
        in_backward: bool = True,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def apply(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = whole(grad)  # rows and columns of all of it
        # Of the whole parameter: the norm of one rank's part would give every rank another rate.
        size = rms(whole(parameter).to(grad.dtype)).clamp(min=group["eps"][1])
        lr = size * group["lr"]
        update = factored_update(grad, state, group, lr)
        move(parameter, update, lr * group["weight_decay"] if group["weight_decay"] else 0.0)

    def has_whole_state(self, group: dict[str, Any]) -> bool:
        return True


adalomo = recipe_of(AdaLomo)
