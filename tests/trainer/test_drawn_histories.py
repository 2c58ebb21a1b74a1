"""Drawn arguments through this Trainer and through transformers': the same events, history, checkpoints and weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.small import Net, rows
from tests.trainer.test_best import memory
from tests.trainer.test_parity import accuracy, both, events_of, transformers
from tests.versions import with_pinned

import windlass

LISTED = {
    "optim": ["adamw_torch", "sgd", "adafactor", "rmsprop", "adagrad"],
    "lr_scheduler_type": ["linear", "cosine", "constant_with_warmup", "inverse_sqrt", "cosine_with_restarts"],
    "warmup_steps": [0, 2, 0.1, 0.3],
    "weight_decay": [0.0, 0.1],
    "max_grad_norm": [0.0, 0.05, 1.0],
    "per_device_train_batch_size": [1, 2, 3],
    "per_device_eval_batch_size": [2, 5],
    "gradient_accumulation_steps": [1, 2, 3],
    "logging_strategy": ["steps", "epoch", "no"],
    "logging_steps": [1, 2, 3, 0.25],
    "logging_first_step": [True, False],
    "eval_strategy": ["steps", "epoch", "no"],
    "eval_steps": [1, 2, 0.3],
    "save_strategy": ["steps", "epoch", "no"],
    "save_steps": [1, 3, 0.5],
    # With 1, transformers deletes the newest checkpoint where another is the best.
    "save_total_limit": [None, 2],
    "eval_accumulation_steps": [None, 1],
    "label_smoothing_factor": [0.0, 0.1],
    "restore_callback_states_from_checkpoint": [True, False],
}
LENGTHS: list[dict[str, Any]] = [
    *({"num_train_epochs": epochs, "max_steps": -1} for epochs in (0.4, 1, 1.5, 3)),
    *({"max_steps": steps} for steps in (1, 4, 7)),
]
EVALUATED: dict[str, list[Any]] = {
    "metric_for_best_model": ["loss", "accuracy", "eval_accuracy"],
    "load_best_model_at_end": [True, False],
    "eval_delay": [0, 2],
    "eval_on_start": [True, False],
}
# Each library's own times, and an estimate that transformers alone makes.
OWN = {"runtime", "second", "flos"}


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    drawn: dict[str, Any] = {name: draw(st.sampled_from(values)) for name, values in LISTED.items()}
    drawn |= draw(st.sampled_from(LENGTHS))
    if drawn["eval_strategy"] != "no" and draw(st.booleans()):
        drawn |= {name: draw(st.sampled_from(values)) for name, values in EVALUATED.items()}
        if drawn["load_best_model_at_end"]:
            drawn |= {"save_strategy": drawn["eval_strategy"], "save_steps": drawn["eval_steps"]}
        elif draw(st.booleans()):
            drawn["save_strategy"] = "best"
    return drawn


class Configured(Net):
    """Their smoothing of labels reads it."""

    config = transformers.PretrainedConfig()


def history(trainer: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if name.rsplit("_", 1)[-1] not in OWN}
        for entry in trainer.state.log_history
    ]


def numbers(trainer: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def best(trainer: Any) -> list[float]:
    return [] if trainer.state.best_metric is None else [trainer.state.best_metric]


@with_pinned("transformers")
@settings(max_examples=8)  # half a second for each
@given(drawn=arguments(), updates=st.sampled_from([1, 2, 3, 5]))
def test_a_run_of_drawn_arguments_is_theirs(drawn: dict[str, Any], updates: int) -> None:
    """Whole updates: a mean over fewer samples is theirs over micro-batches, and ours over samples."""
    whole = drawn["per_device_train_batch_size"] * drawn["gradient_accumulation_steps"] * updates
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        ours, theirs = both(
            Path(folder), Configured, rows(whole), rows(7, seed=5), compute_metrics=accuracy,
            train_sampling_strategy="sequential", **drawn,
        )  # fmt: skip
        assert events_of(ours, windlass) == events_of(theirs, transformers)
        assert len(history(ours)) == len(history(theirs))
        for mine, other in zip(history(ours), history(theirs), strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-4, abs=1e-5)
        checkpoints = [
            sorted(path.name for path in (Path(folder) / of).glob("checkpoint-*"))
            for of in ("ours", "theirs")
        ]
        assert checkpoints[0] == checkpoints[1]
        assert best(ours) == pytest.approx(best(theirs), rel=1e-4, abs=1e-5)
