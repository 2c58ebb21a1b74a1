"""The schedules by name: one line for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from windlass.optim.schedules.greedy import GreedyLR
from windlass.optim.schedules.simple import (
    Factor,
    constant,
    constant_with_warmup,
    cosine,
    cosine_warmup_with_min_lr,
    cosine_with_min_lr,
    cosine_with_restarts,
    inverse_sqrt,
    linear,
    polynomial,
)
from windlass.optim.schedules.warmup_stable_decay import warmup_stable_decay

# Functions of the step alone: (Span, **options) -> Factor.
SHAPES: dict[str, Callable[..., Factor]] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant_with_warmup,
    "inverse_sqrt": inverse_sqrt,
    "cosine_with_min_lr": cosine_with_min_lr,
    "cosine_warmup_with_min_lr": cosine_warmup_with_min_lr,
    "warmup_stable_decay": warmup_stable_decay,
}

# Those that follow a metric of the evaluation: (optimizer, **options) -> an object with `step(metric)`.
METRIC_DRIVEN: dict[str, Callable[..., Any]] = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}

SCHEDULE_NAMES = (*SHAPES, *METRIC_DRIVEN)
# Schedules without a warm-up: `warmup_steps` has no effect, with a warning.
WITHOUT_WARMUP = frozenset({"constant", *METRIC_DRIVEN})
