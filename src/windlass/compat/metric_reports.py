"""Metrics as scripts print and write them, and the methods of a Trainer that they call as functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
