"""Linear warm-up, then a fall with the inverse square root of the step (Vaswani et al., arXiv:1706.03762)."""

from __future__ import annotations

import math

from windlass.optim.schedules.base import Factor, Span, rising


def inverse_sqrt(span: Span, *, timescale: float | None = None) -> Factor:
    """`timescale` (updates) sets how slow the fall is; the warm-up's length by default, 10 000 without warm-up."""
    warmup = span.warmup
    scale = (warmup or 10_000) if timescale is None else timescale
    shift = scale - warmup

    def factor(step: int) -> float:
        if step < warmup:
            return rising(step, warmup)
        return 1.0 / math.sqrt((step + shift) / scale)

    return factor
