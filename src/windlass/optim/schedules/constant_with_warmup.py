"""Linear warm-up, then the same learning rate throughout."""

from __future__ import annotations

from windlass.optim.schedules.base import Factor, Span, rising


def constant_with_warmup(span: Span) -> Factor:
    warmup = span.warmup

    def factor(step: int) -> float:
        return rising(step, warmup) if step < warmup else 1.0

    return factor
