"""Metrics as scripts print and write them, and the methods of a Trainer that they call as functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.metrics import speed
from windlass.trainer.reports import readable
from windlass.trainer.trainer_names import TrainerNames

log_metrics = TrainerNames.log_metrics
save_metrics = TrainerNames.save_metrics
save_state = TrainerNames.save_state
get_num_trainable_parameters = TrainerNames.get_num_trainable_parameters
get_learning_rates = TrainerNames.get_learning_rates
get_optimizer_group = TrainerNames.get_optimizer_group


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for people: times as h:m:s, memory in MB, FLOPs in GF, other floats with four digits."""
    return {name: readable(name, value) for name, value in metrics.items()}


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Seconds since `start_time` and the rates of what is given; see `windlass.metrics.speed.speed_metrics`."""
    return speed.speed_metrics(split, start_time, num_samples, num_steps, num_tokens)
