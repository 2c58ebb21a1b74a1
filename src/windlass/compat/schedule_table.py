"""The schedules of `windlass.optim.public` by type, and the rolling mean that scripts smooth metrics with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

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
