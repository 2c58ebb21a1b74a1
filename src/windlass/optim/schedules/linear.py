"""Linear warm-up, then a straight line to 0."""

from __future__ import annotations

from windlass.optim.schedules.base import Factor, Span, rising


def linear(span: Span) -> Factor:
    warmup, total = span.warmup, span.known_total("linear")
    decay = max(1, total - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return rising(step, warmup)
        return max(0.0, (total - step) / decay)

    return factor
