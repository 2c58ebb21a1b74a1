"""Linear warm-up, then cosine waves (Loshchilov & Hutter, arXiv:1608.03983, without restarts)."""

from __future__ import annotations

import math

from windlass.optim.schedules.base import Factor, Span, rising


def cosine(span: Span, *, num_cycles: float = 0.5) -> Factor:
    """`num_cycles` whole waves; the usual 0.5 falls once from the peak to 0."""
    warmup, total = span.warmup, span.known_total("cosine")
    decay = max(1, total - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return rising(step, warmup)
        progress = (step - warmup) / decay
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))

    return factor
