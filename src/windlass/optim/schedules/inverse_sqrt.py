"""Linear warm-up, then a fall with the inverse square root of the step (Vaswani et al., arXiv:1706.03762)."""

from __future__ import annotations

import math
from functools import partial

from windlass.optim.schedules.base import Factor, Span, warming_up


def inverse_sqrt(span: Span, *, timescale: float | None = None) -> Factor:
    """`timescale` (updates) sets how slow the fall is; the warm-up's length by default, 10 000 without warm-up."""
    scale = (span.warmup or 10_000) if timescale is None else timescale
    return warming_up(span, partial(_fall, scale - span.warmup, scale))


def _fall(shift: float, scale: float, step: int) -> float:
    return 1.0 / math.sqrt((step + shift) / scale)
