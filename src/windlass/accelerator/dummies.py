"""Placeholders of the optimizer and the schedule that a DeepSpeed configuration has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DummyOptim:
    """Represents the optimizer of a DeepSpeed configuration; `accelerator.prepare` returns that one.

    Args:
        params: the parameters, or groups of them.
        lr, weight_decay: the values of "auto" in the configuration.
        kwargs: further options of the optimizer.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs


class DummyScheduler:
    """Represents the schedule of a DeepSpeed configuration; `accelerator.prepare` returns that one.

    Args:
        optimizer: a `DummyOptim`, or an optimizer.
        total_num_steps, warmup_num_steps: the values of "auto" in the configuration, in the unit of prepared schedules.
        lr_scheduler_callable: makes the schedule of an optimizer, instead of the configuration.
        kwargs: no effect.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.total_num_steps = optimizer, total_num_steps
        self.warmup_num_steps, self.lr_scheduler_callable, self.kwargs = (
            warmup_num_steps,
            lr_scheduler_callable,
            kwargs,
        )
