"""Linear warm-up, then a straight line to 0."""

from __future__ import annotations

from functools import partial

from windlass.optim.schedules.base import Factor, Span, warming_up


def linear(span: Span) -> Factor:
    total = span.known_total("linear")
    return warming_up(span, partial(_fall, total, max(1, total - span.warmup)))


def _fall(total: float, decay: float, step: int) -> float:
    return max(0.0, (total - step) / decay)
