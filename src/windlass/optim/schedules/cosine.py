"""Cosine waves after a warm-up (Loshchilov & Hutter, arXiv:1608.03983): to 0, to a floor, or with restarts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from windlass.optim.schedules.base import Factor, Span, decaying, floor_rate


def cosine(span: Span, *, num_cycles: float = 0.5) -> Factor:
    """Linear warm-up, then `num_cycles` whole waves; the usual 0.5 falls once from the peak to 0."""
    return decaying(span, "cosine", partial(_wave_above, 0.0, num_cycles))


def cosine_with_min_lr(
    span: Span, *, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> Factor:
    """As `cosine`, but down to `min_lr` (a learning rate) or to `min_lr_rate` times the peak."""
    floor = floor_rate(span, min_lr, min_lr_rate)
    return decaying(span, "cosine_with_min_lr", partial(_wave_above, floor, num_cycles))


def cosine_with_restarts(span: Span, *, num_cycles: float = 1) -> Factor:
    """Linear warm-up, then `num_cycles` falls of equal length, each from the peak (SGDR); 0 after the run."""
    return decaying(span, "cosine_with_restarts", partial(_restarts, num_cycles))


def cosine_warmup_with_min_lr(
    span: Span,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Factor:
    """Rise from `warmup_lr_rate` (1/warmup by default), then fall to `min_lr` or to `min_lr_rate` times the peak.

    Counts steps from 1: the last step of the warm-up is at the peak and the last of the run at the floor.
    """
    warmup, total = span.warmup, span.known_total("cosine_warmup_with_min_lr")
    fall = partial(_wave_above, floor_rate(span, min_lr, min_lr_rate), num_cycles)
    return partial(_rise_and_fall, warmup, warmup_lr_rate, max(1.0, total - warmup), fall)


def _rise_and_fall(
    warmup: float, first: float | None, decay: float, fall: Callable[[float], float], step: int
) -> float:
    if step >= warmup:
        return fall((step - warmup + 1.0) / decay)
    if first is None:
        return (step + 1.0) / max(1.0, warmup)
    return first + (1.0 - first) * step / max(1, warmup - 1)


def _restarts(cycles: float, progress: float) -> float:
    return 0.0 if progress >= 1.0 else max(0.0, _wave(0.5, (cycles * progress) % 1.0))


def _wave_above(floor: float, cycles: float, progress: float) -> float:
    return max(0.0, _wave(cycles, progress) * (1 - floor) + floor)


def _wave(cycles: float, progress: float) -> float:
    """From 1 down to 0 and up again, `cycles` times while `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
