"""The schedules of `windlass.optim.public` by type, the rate of Adafactor as a schedule, and a rolling mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from windlass.config.enums import SchedulerType
from windlass.optim import public

TYPE_TO_SCHEDULER_FUNCTION: dict[SchedulerType, Callable[..., Any]] = {
    SchedulerType.LINEAR: public.get_linear_schedule_with_warmup,
    SchedulerType.COSINE: public.get_cosine_schedule_with_warmup,
    SchedulerType.COSINE_WITH_RESTARTS: public.get_cosine_with_hard_restarts_schedule_with_warmup,
    SchedulerType.POLYNOMIAL: public.get_polynomial_decay_schedule_with_warmup,
    SchedulerType.CONSTANT: public.get_constant_schedule,
    SchedulerType.CONSTANT_WITH_WARMUP: public.get_constant_schedule_with_warmup,
    SchedulerType.INVERSE_SQRT: public.get_inverse_sqrt_schedule,
    SchedulerType.REDUCE_ON_PLATEAU: public.get_reduce_on_plateau_schedule,
    SchedulerType.COSINE_WITH_MIN_LR: public.get_cosine_with_min_lr_schedule_with_warmup,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: public.get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    SchedulerType.WARMUP_STABLE_DECAY: public.get_wsd_schedule,
    SchedulerType.GREEDY: public.get_greedy_schedule,
}


class StreamingAverage:
    """The mean of the last `window_size` values."""

    def __init__(self, window_size: int) -> None:
        self.load_state_dict({"window_size": window_size})

    @property
    def sum(self) -> float:
        """The sum of the values that count."""
        return sum(self.values)

    def streamavg(self, value: float) -> float:
        """Take in a value and return the mean."""
        self.values.append(value)
        return self.sum / len(self.values)

    def state_dict(self) -> dict[str, Any]:
        return {"window_size": self.window_size, "values": list(self.values), "sum": self.sum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.window_size: int = state_dict.get("window_size", getattr(self, "window_size", 1))
        self.values: deque[float] = deque(state_dict.get("values", ()), maxlen=self.window_size)


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
