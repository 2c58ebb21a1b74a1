"""Linear warm-up, then a polynomial fall to a small learning rate."""

from __future__ import annotations

from windlass.core.errors import ConfigError, Problem
from windlass.optim.schedules.base import Factor, Span, rising


def polynomial(span: Span, *, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    """Ends at the learning rate `lr_end`, which must lie below the peak."""
    warmup, total, peak = span.warmup, span.known_total("polynomial"), span.peak
    if lr_end >= peak:
        raise ConfigError(
            Problem("lr_scheduler_kwargs.lr_end", lr_end, f"must be below the learning rate {peak}")
        )
    decay = max(1, total - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return rising(step, warmup)
        if step > total:
            return lr_end / peak
        remaining = 1 - (step - warmup) / decay
        return float(((peak - lr_end) * remaining**power + lr_end) / peak)

    return factor
