"""Metrics as scripts print and write them, and the methods of a Trainer that they call as functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.trainer.reports import readable
from windlass.trainer.trainer import Trainer

log_metrics = Trainer.log_metrics
save_metrics = Trainer.save_metrics
save_state = Trainer.save_state
get_num_trainable_parameters = Trainer.get_num_trainable_parameters
get_learning_rates = Trainer.get_learning_rates
get_optimizer_group = Trainer.get_optimizer_group


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for people: times as h:m:s, memory in MB, FLOPs in GF, other floats with four digits."""
    return {name: readable(name, value) for name, value in metrics.items()}
