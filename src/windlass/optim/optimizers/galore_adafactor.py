"""GaLore with Adafactor (Zhao et al., arXiv:2403.03507; Shazeer & Stern, arXiv:1804.04235)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.dist.sharded import whole
from windlass.optim.optimizers.adafactor import factored_update
from windlass.optim.optimizers.low_rank import LowRankOptimizer
from windlass.optim.optimizers.options import arguments, recipe_of


class GaLoreAdafactor(LowRankOptimizer):
    """Adafactor whose moments are those of projected gradients; for the arguments of the projection see
    `LowRankOptimizer`.

    Args:
        lr: an outside learning rate; there is no relative step, and no scaling by the size of the parameter.
        eps: the first number is added to squared gradients.
        clip_threshold: as in `Adafactor`.
        decay_rate: as in `Adafactor`.
        beta1: as in `Adafactor`.
        weight_decay: as in `Adafactor`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        in_backward: bool = False,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def displacement(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return factored_update(whole(grad), state, group, group["lr"])  # rows and columns of all of it

    def has_whole_state(self, group: dict[str, Any]) -> bool:
        return True


galore_adafactor = recipe_of(GaLoreAdafactor)
