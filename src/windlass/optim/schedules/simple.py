"""Schedules without a wave: constant, and a fall along a straight line, a polynomial or an inverse square root."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from windlass.core.errors import ConfigError, Problem
from windlass.optim.schedules.base import Factor, Span, decaying, floor_rate, warming_up


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
    return warming_up(span, partial(_root, scale - span.warmup, scale))


def _root(shift: float, scale: float, step: int) -> float:
    return 1.0 / math.sqrt((step + shift) / scale)


def polynomial(span: Span, *, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    """Linear warm-up, then a polynomial fall to the learning rate `lr_end`, which must lie below the peak."""
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
    return 0.0 if progress >= 1.0 else max(0.0, _wave(0.5, (cycles * progress) % 1.0))


def _wave_above(floor: float, cycles: float, progress: float) -> float:
    return max(0.0, _wave(cycles, progress) * (1 - floor) + floor)


def _wave(cycles: float, progress: float) -> float:
    """From 1 down to 0 and up again, `cycles` times while `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
