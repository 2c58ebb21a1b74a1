"""A warm-up that starts above 0, then cosine waves that end above 0.

Counts steps from 1: the last step of the warm-up is at the peak and the last of the run at the floor.
"""

from __future__ import annotations

import math

from windlass.optim.schedules.base import Factor, Span, floor_rate


def cosine_warmup_with_min_lr(
    span: Span,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Factor:
    """Rises from `warmup_lr_rate` (1/warmup by default), falls to `min_lr` or to `min_lr_rate` times the peak."""
    warmup, total = span.warmup, span.known_total("cosine_warmup_with_min_lr")
    floor = floor_rate(span, min_lr, min_lr_rate)
    decay = max(1.0, total - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            if warmup_lr_rate is None:
                return (step + 1.0) / max(1.0, warmup)
            return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, warmup - 1)
        progress = (step - warmup + 1.0) / decay
        wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
        return max(0.0, wave * (1 - floor) + floor)

    return factor
