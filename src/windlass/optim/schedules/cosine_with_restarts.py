"""Linear warm-up, then cosine falls that each start again at the peak (SGDR, arXiv:1608.03983)."""

from __future__ import annotations

import math

from windlass.optim.schedules.base import Factor, Span, rising


def cosine_with_restarts(span: Span, *, num_cycles: float = 1) -> Factor:
    """`num_cycles` falls of equal length; 0 from the end of the run on."""
    warmup, total = span.warmup, span.known_total("cosine_with_restarts")
    decay = max(1, total - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return rising(step, warmup)
        progress = (step - warmup) / decay
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0))))

    return factor
