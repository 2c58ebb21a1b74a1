"""The same learning rate throughout."""

from __future__ import annotations

from windlass.optim.schedules.base import Factor, Span


def constant(span: Span) -> Factor:
    def factor(step: int) -> float:
        return 1.0

    return factor
