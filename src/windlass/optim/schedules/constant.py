"""A constant learning rate, with and without a warm-up."""

from __future__ import annotations

from windlass.optim.schedules.base import Factor, Span, warming_up


def constant(span: Span) -> Factor:
    """The peak throughout."""
    return _peak


def constant_with_warmup(span: Span) -> Factor:
    """Linear warm-up, then the peak."""
    return warming_up(span, _peak)


def _peak(step: int) -> float:
    return 1.0
