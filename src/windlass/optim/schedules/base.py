"""Inputs and parts of the schedule functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from windlass.core.errors import ConfigError, Problem

# Update index (0 is the first update) -> factor on the peak learning rate. Pure: the same step, the same factor.
# Each is a `partial` of a module's function and not a closure, so that schedules can be pickled and copied.
Factor = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Span:
    """The run that a schedule covers."""

    warmup: float  # updates over which the learning rate rises
    total: float | None  # updates of the whole run, warm-up included; None if it is not known
    peak: float  # the learning rate that factors multiply; for schedules whose floor is a learning rate

    def known_total(self, name: str) -> float:
        """`total`, for schedules that need it. Raises ConfigError if it is None."""
        if self.total is None:
            raise ConfigError(Problem("num_training_steps", None, f"the {name} schedule needs it"))
        return self.total


def warming_up(span: Span, after: Factor) -> Factor:
    """Linear warm-up from 0 to the peak, then `after`, which receives the step of the run."""
    return partial(_warm_up, span.warmup, after) if span.warmup else after


def decaying(span: Span, name: str, curve: Callable[[float], float]) -> Factor:
    """Linear warm-up, then `curve` of the progress from the peak (0) to the end of the run (1). Raises ConfigError if
    the length of the run is not known; `name` is the schedule's.
    """
    warmup = span.warmup
    decay = max(1, span.known_total(name) - warmup)
    return warming_up(span, partial(_along, curve, warmup, decay))


def _warm_up(warmup: float, after: Factor, step: int) -> float:
    return step / max(1, warmup) if step < warmup else after(step)  # a warm-up may be shorter than an update


def _along(curve: Callable[[float], float], start: float, length: float, step: int) -> float:
    return curve((step - start) / length)


def floor_rate(span: Span, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The floor of a schedule as a share of the peak, from exactly one of `min_lr` and `min_lr_rate`. Raises
    ConfigError if neither or both are set.
    """
    if (min_lr is None) == (min_lr_rate is None):
        fix = "give exactly one of min_lr (a learning rate) and min_lr_rate (a share of the peak)"
        value = {"min_lr": min_lr, "min_lr_rate": min_lr_rate}
        raise ConfigError(Problem("lr_scheduler_kwargs", value, fix))
    return min_lr / span.peak if min_lr is not None else min_lr_rate  # type: ignore[return-value]
