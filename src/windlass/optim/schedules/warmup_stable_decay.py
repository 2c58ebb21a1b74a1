"""Warm-up, a plateau at the peak, then a decay (Hu et al., arXiv:2404.06395)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.optim.schedules.simple import Factor, Span, wave

_log = get_job_logger(__name__)
_TYPES = ("linear", "cosine", "1-sqrt")
Curve = Callable[[float], float]  # progress 0..1 -> 0..1


def warmup_stable_decay(
    span: Span,
    *,
    num_decay_steps: float,
    num_stable_steps: float | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
) -> Factor:
    """The three phases' lengths in updates; the plateau takes what warm-up and decay leave of the run.

    `min_lr_ratio` times the peak is where the warm-up starts and the decay ends. `num_cycles` is for the cosine decay.
    """
    warmup = span.warmup
    stable = _stable_steps(span, num_stable_steps, num_decay_steps)
    phases = _Phases(warmup, stable, num_decay_steps)
    return partial(_factor, phases, _rise(warmup_type), _fall(decay_type, num_cycles), min_lr_ratio)


class _Phases(NamedTuple):
    """The lengths of the three phases, in updates."""

    warmup: float
    stable: float
    decay: float


def _factor(phases: _Phases, rise: Curve, fall: Curve, floor: float, step: int) -> float:
    warmup, stable, decay = phases
    room = 1.0 - floor
    if step < warmup:
        return max(0.0, rise(step / max(1, warmup)) * room + floor)
    if step < warmup + stable:
        return 1.0
    if step < warmup + stable + decay:
        return max(0.0, fall((step - warmup - stable) / max(1, decay)) * room + floor)
    return floor


def _stable_steps(span: Span, given: float | None, decay: float) -> float:
    if given is None:
        stable = span.known_total("warmup_stable_decay") - span.warmup - decay
        if stable < 0:
            fix = f"warm-up ({span.warmup}) and decay together are longer than the run ({span.total} updates)"
            raise ConfigError(Problem("lr_scheduler_kwargs.num_decay_steps", decay, fix))
        return stable
    if span.total is not None and span.warmup + given + decay != span.total:
        _log.warning(
            "warmup_stable_decay: warm-up %s + stable %s + decay %s updates are not the run's %s.",
            span.warmup,
            given,
            decay,
            span.total,
        )
    return given


def _rise(kind: str) -> Curve:
    _known("warmup_type", kind)
    if kind == "linear":
        # As the identity: a lambda could not be pickled.
        return float
    return _rise_along_cosine if kind == "cosine" else _rise_along_root


def _fall(kind: str, cycles: float) -> Curve:
    _known("decay_type", kind)
    if kind == "linear":
        return partial(operator.sub, 1.0)
    return partial(wave, cycles) if kind == "cosine" else _fall_along_root


def _rise_along_cosine(progress: float) -> float:
    return 0.5 * (1.0 - math.cos(math.pi * progress))


def _rise_along_root(progress: float) -> float:
    return 1.0 - math.sqrt(1.0 - progress)


def _fall_along_root(progress: float) -> float:
    return 1.0 - math.sqrt(progress)


def _known(option: str, kind: str) -> None:
    if kind not in _TYPES:
        raise ConfigError(
            Problem(f"lr_scheduler_kwargs.{option}", kind, f"must be one of {', '.join(_TYPES)}")
        )
