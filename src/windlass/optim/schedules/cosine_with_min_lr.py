"""Linear warm-up, then cosine waves that end above 0."""

from __future__ import annotations

import math

from windlass.optim.schedules.base import Factor, Span, floor_rate, rising


def cosine_with_min_lr(
    span: Span, *, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> Factor:
    """Falls to `min_lr` (a learning rate) or to `min_lr_rate` times the peak."""
    warmup, total = span.warmup, span.known_total("cosine_with_min_lr")
    floor = floor_rate(span, min_lr, min_lr_rate)
    decay = max(1, total - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return rising(step, warmup)
        progress = (step - warmup) / decay
        wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
        return max(0.0, wave * (1 - floor) + floor)

    return factor
