"""What a search has unless a script says otherwise: spaces, the objective; and its result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from windlass.config.enums import Choice
from windlass.core.optional import require

_BATCH_SIZES = (4, 8, 16, 32, 64)
# Metrics of what an evaluation took, and not of what it found. The tokens that a run of fine-tuning was trained on are
# in its evaluations. They are thousands, and scores are not.
_COSTS = ("_runtime", "_per_second", "_num_tokens")
_NO_SCORES = ("eval_loss", "epoch")
_MEMORY = re.compile("_peak_memory_(process|device)_gib$|_mem_(cpu|gpu)(_|$)")


class HPSearchBackend(Choice):
    """Packages that search over hyperparameters; "random" and "grid" need none."""

    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"


class BestRun(NamedTuple):
    """The best run of a search: the number of its trial, its objective, its settings, and the search's own summary."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_compute_objective(metrics: Mapping[str, float]) -> float | None:
    """The sum of an evaluation's metrics; `eval_loss` if there is nothing else. The epoch, speeds, memory and the
    tokens that were trained on do not count.
    """
    counted = [
        value
        for name, value in metrics.items()
        if name not in _NO_SCORES and not name.endswith(_COSTS) and not _MEMORY.search(name)
    ]
    return sum(counted) if counted else metrics.get("eval_loss")


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Learning rate, epochs, seed and batch size, as an optuna trial suggests them."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical(
            "per_device_train_batch_size", list(_BATCH_SIZES)
        ),
    }


def default_hp_space_ray(trial: Any = None) -> dict[str, Any]:
    """The same space in the words of Ray Tune."""
    tune = require("ray.tune", "search over hyperparameters")
    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.uniform(1, 40),
        "per_device_train_batch_size": tune.choice(list(_BATCH_SIZES)),
    }


def default_hp_space_wandb(trial: Any = None) -> dict[str, Any]:
    """The same space as the configuration of a sweep of Weights & Biases."""
    return {
        "method": "random",
        "metric": {"name": "objective", "goal": "minimize"},
        "parameters": {
            "learning_rate": {"distribution": "uniform", "min": 1e-6, "max": 1e-4},
            "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": 6},
            "seed": {"distribution": "int_uniform", "min": 1, "max": 40},
            "per_device_train_batch_size": {"values": list(_BATCH_SIZES)},
        },
    }


def hp_params(trial: Any) -> Any:
    """The settings of a trial: a dict is itself, a trial of optuna has them as `params`. Raises RuntimeError if it is
    neither.
    """
    if isinstance(trial, dict):
        return trial
    if hasattr(trial, "params"):
        return trial.params
    raise RuntimeError(f"a {type(trial).__name__} is not a trial: give a dict, or a trial of optuna")
