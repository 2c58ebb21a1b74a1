"""Schedules without a wave: constant, and a fall along a straight line, a polynomial or an inverse square root."""

from __future__ import annotations

import math
from functools import partial

from windlass.core.errors import ConfigError, Problem
from windlass.optim.schedules.base import Factor, Span, warming_up


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
