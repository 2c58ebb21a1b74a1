"""Linear warm-up, then a polynomial fall to a small learning rate."""

from __future__ import annotations

from functools import partial

from windlass.core.errors import ConfigError, Problem
from windlass.optim.schedules.base import Factor, Span, warming_up


def polynomial(span: Span, *, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    """Ends at the learning rate `lr_end`, which must lie below the peak."""
    span.known_total("polynomial")
    if lr_end >= span.peak:
        raise ConfigError(
            Problem("lr_scheduler_kwargs.lr_end", lr_end, f"must be below the learning rate {span.peak}")
        )
    return warming_up(span, partial(_fall, span, lr_end, power))


def _fall(span: Span, lr_end: float, power: float, step: int) -> float:
    warmup, total, peak = span.warmup, span.known_total("polynomial"), span.peak
    if step > total:
        return lr_end / peak
    remaining = 1 - (step - warmup) / max(1, total - warmup)
    return float(((peak - lr_end) * remaining**power + lr_end) / peak)
