"""What schedules have in common, and those without options of their own: constant, and a fall along a straight line, a
polynomial, an inverse square root or a cosine.
"""

from __future__ import annotations

import math
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
    # At least 1, as a run that is all warm-up would divide by 0.
    decay = max(1, span.known_total(name) - warmup)
    return warming_up(span, partial(_along, curve, warmup, decay))


def _warm_up(warmup: float, after: Factor, step: int) -> float:
    return step / max(1, warmup) if step < warmup else after(step)  # a warm-up may be shorter than an update


def _along(curve: Callable[[float], float], start: float, length: float, step: int) -> float:
    return curve((step - start) / length)


def floor_rate(span: Span, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The floor of a schedule as a share of the peak, from exactly one of `min_lr` and `min_lr_rate`. Raises
    ConfigError if neither or both are set, or if `min_lr` has no peak to be a share of.
    """
    if (min_lr is None) == (min_lr_rate is None):
        fix = "give exactly one of min_lr (a learning rate) and min_lr_rate (a share of the peak)"
        value = {"min_lr": min_lr, "min_lr_rate": min_lr_rate}
        raise ConfigError(Problem("lr_scheduler_kwargs", value, fix))
    if min_lr is not None and not span.peak:
        fix = f"a schedule that falls to min_lr={min_lr} needs a learning rate above 0"
        raise ConfigError(Problem("learning_rate", span.peak, fix))
    return min_lr / span.peak if min_lr is not None else min_lr_rate  # type: ignore[return-value]


def constant(span: Span) -> Factor:
    """The peak throughout."""
    return _peak


def constant_with_warmup(span: Span) -> Factor:
    """Linear warm-up, then the peak."""
    return warming_up(span, _peak)


def _peak(step: int) -> float:
    return 1.0


def linear(span: Span) -> Factor:
    """Linear warm-up, then a straight line to 0."""
    total = span.known_total("linear")
    return warming_up(span, partial(_line, total, max(1, total - span.warmup)))


def _line(total: float, decay: float, step: int) -> float:
    return max(0.0, (total - step) / decay)


def inverse_sqrt(span: Span, *, timescale: float | None = None) -> Factor:
    """Linear warm-up, then a fall with the inverse square root of the step (Vaswani et al., arXiv:1706.03762).
    `timescale` (updates) sets how slow it is; the warm-up's length by default, 10 000 without warm-up.
    """
    scale = (span.warmup or 10_000) if timescale is None else timescale
    if not scale > 0:
        raise ConfigError(Problem("lr_scheduler_kwargs.timescale", timescale, "must be above 0"))
    return warming_up(span, partial(_root, scale - span.warmup, scale))


def _root(shift: float, scale: float, step: int) -> float:
    return 1.0 / math.sqrt((step + shift) / scale)


def polynomial(span: Span, *, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    """Linear warm-up, then a polynomial fall to the learning rate `lr_end`, which must lie below the peak."""
    # Only checked here, so that the error comes when the schedule is made and not in its first update.
    span.known_total("polynomial")
    if lr_end >= span.peak:
        fix = f"must be below the learning rate {span.peak}"
        raise ConfigError(Problem("lr_scheduler_kwargs.lr_end", lr_end, fix))
    return warming_up(span, partial(_power, span, lr_end, power))


def _power(span: Span, lr_end: float, power: float, step: int) -> float:
    warmup, total, peak = span.warmup, span.known_total("polynomial"), span.peak
    if step > total:
        return lr_end / peak
    remaining = 1 - (step - warmup) / max(1, total - warmup)
    return float(((peak - lr_end) * remaining**power + lr_end) / peak)


def cosine(span: Span, *, num_cycles: float = 0.5) -> Factor:
    """Linear warm-up, then `num_cycles` whole waves; the usual 0.5 falls once from the peak to 0."""
    return decaying(span, "cosine", partial(_wave_above, 0.0, num_cycles))


def cosine_with_min_lr(
    span: Span, *, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> Factor:
    """As `cosine`, but down to `min_lr` (a learning rate) or to `min_lr_rate` times the peak."""
    floor = floor_rate(span, min_lr, min_lr_rate)
    return decaying(span, "cosine_with_min_lr", partial(_wave_above, floor, num_cycles))


def cosine_with_restarts(span: Span, *, num_cycles: float = 1) -> Factor:
    """Linear warm-up, then `num_cycles` falls of equal length, each from the peak (SGDR); 0 after the run."""
    return decaying(span, "cosine_with_restarts", partial(_restarts, num_cycles))


def cosine_warmup_with_min_lr(
    span: Span,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Factor:
    """Rise from `warmup_lr_rate` (1/warmup by default), then fall to `min_lr` or to `min_lr_rate` times the peak.

    Counts steps from 1: the last step of the warm-up is at the peak and the last of the run at the floor.
    """
    warmup, total = span.warmup, span.known_total("cosine_warmup_with_min_lr")
    fall = partial(_wave_above, floor_rate(span, min_lr, min_lr_rate), num_cycles)
    return partial(_rise_and_fall, warmup, warmup_lr_rate, max(1.0, total - warmup), fall)


def _rise_and_fall(
    warmup: float, first: float | None, decay: float, fall: Callable[[float], float], step: int
) -> float:
    if step >= warmup:
        return fall((step - warmup + 1.0) / decay)
    if first is None:
        return (step + 1.0) / max(1.0, warmup)
    return first + (1.0 - first) * step / max(1, warmup - 1)


def _restarts(cycles: float, progress: float) -> float:
    # The end needs its own case: 1.0 % 1.0 is 0, the peak of a next cycle.
    return 0.0 if progress >= 1.0 else max(0.0, wave(0.5, (cycles * progress) % 1.0))


def _wave_above(floor: float, cycles: float, progress: float) -> float:
    return max(0.0, wave(cycles, progress) * (1 - floor) + floor)


def wave(cycles: float, progress: float) -> float:
    """From 1 down to 0 and up again, `cycles` times while `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
