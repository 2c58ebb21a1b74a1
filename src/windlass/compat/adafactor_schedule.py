"""The learning rate that Adafactor sets by itself, shown as a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR


class AdafactorSchedule(LambdaLR):
    """Shows the rate of an `Adafactor(relative_step=True)` to whatever logs learning rates; it sets none.

    Args:
        optimizer: an `Adafactor`.
        initial_lr: what is shown before the first update.
    """

    def __init__(self, optimizer: Any, initial_lr: float = 0.0) -> None:
        for group in optimizer.param_groups:
            group["initial_lr"] = initial_lr
        super().__init__(optimizer, lambda _: initial_lr)
        for group in optimizer.param_groups:
            del group["initial_lr"]

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group's first parameter in the last update; the initial one before it."""
        groups = [group for group in self.optimizer.param_groups if group["params"][0].grad is not None]
        rate_of: Callable[[Any], Tensor] = self.optimizer.rate_of  # type: ignore[attr-defined]
        return [rate_of(group) for group in groups] or list(self.base_lrs)


def get_adafactor_schedule(optimizer: Any, initial_lr: float = 0.0) -> AdafactorSchedule:
    """An `AdafactorSchedule` of this optimizer."""
    return AdafactorSchedule(optimizer, initial_lr)
