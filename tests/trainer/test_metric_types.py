"""Metrics of any type, from `compute_metrics`, `log` and callbacks, through everything that a run writes."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.core.test_metric_values import NESTED, NUMBERS, TEXTS
from tests.trainer.small import Net, arguments, rows, weights_hash

from windlass import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from windlass.callbacks.metrics_log import read_metrics
from windlass.callbacks.report import ReportCallback
from windlass.core.errors import ConfigError

KINDS = {f"kind{i}": value for i, (value, _) in enumerate(NUMBERS + NESTED + TEXTS)}
KINDS |= {"nan": math.nan, "inf": np.float32("inf")}


class Logging(TrainerCallback):
    """Logs as scripts do: through the Trainer, and into its history by hand."""

    trainer: Trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.log({"mine": Decimal(state.global_step), "odd": 1j, 5: np.float32(0.5)})  # type: ignore[dict-item]
        state.log_history.append({"by_hand": {1, 2}, "at": Path("/x"), "step": state.global_step})


def trainer_for(folder: Path, metrics: Any, callbacks: Any = (), **changes: Any) -> Trainer:
    chosen = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
    }
    return Trainer(
        Net(),
        arguments(folder, **{**chosen, **changes}),
        train_dataset=rows(16),
        eval_dataset=rows(4),
        compute_metrics=metrics,
        callbacks=list(callbacks),
    )


def run(folder: Path, resume: str | None = None, **changes: Any) -> Trainer:
    logging = Logging()
    trainer = trainer_for(folder, lambda _: dict(KINDS), [logging, ReportCallback(folder)], **changes)
    logging.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def lasting(rows: Any) -> str:
    """Rows without what depends on the clock; NaN is equal to itself as text."""
    return json.dumps([{k: v for k, v in row.items() if k != "timing" and "_runtime" not in k and "_per_" not in k}
                       for row in rows], sort_keys=True)  # fmt: skip


def test_metrics_of_every_type_go_through_a_whole_run(tmp_path: Path) -> None:
    whole = run(tmp_path)
    history = whole.state.log_history
    evaluated = next(row for row in history if "eval_loss" in row)
    for i, (_, expected) in enumerate(NUMBERS + NESTED):
        assert evaluated[f"eval_kind{i}"] == expected
    assert evaluated["eval_inf"] == math.inf
    assert [row["mine"] for row in history if "mine" in row] == [0.0, 1.0, 2.0, 3.0]
    assert next(row for row in history if "mine" in row)["odd"] == "1j"
    written = read_metrics(tmp_path / "metrics.jsonl")
    assert "loss" in (tmp_path / "report.html").read_text().lower()
    kept = TrainerState.load_from_json(tmp_path / "checkpoint-2").log_history
    assert next(row for row in kept if "eval_inf" in row)["eval_inf"] == math.inf
    whole.save_state()
    saved = TrainerState.load_from_json(str(tmp_path / "trainer_state.json")).log_history
    assert next(row for row in saved if "by_hand" in row) == {"by_hand": [1, 2], "at": "/x", "step": 0}

    resumed = run(tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert weights_hash(resumed.model) == weights_hash(whole.model)
    resumed.save_state()
    again = TrainerState.load_from_json(str(tmp_path / "trainer_state.json")).log_history
    assert lasting(again) == lasting(saved)
    assert lasting(read_metrics(tmp_path / "metrics.jsonl")) == lasting(written)


@pytest.mark.parametrize("value", ["0.5", None, 1j, [1.0, 2.0], Path("/x")])
def test_a_best_metric_that_is_no_number_is_refused_before_the_first_update(
    tmp_path: Path, value: Any
) -> None:
    changes = {"metric_for_best_model": "score", "load_best_model_at_end": True}
    trainer = trainer_for(tmp_path, lambda _: {"score": value}, **changes)
    with pytest.raises(ConfigError, match=r"metric_for_best_model='score'.*eval_score = .*is not a number"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_best_model_and_early_stopping_go_by_numbers_of_any_type(tmp_path: Path) -> None:
    scores = iter(
        [Decimal("0.5")] + [torch.tensor([0.5]), np.float32(0.75), Decimal("0.5"), np.array(0.25)] * 2
    )
    changes = {"metric_for_best_model": "score", "load_best_model_at_end": True, "greater_is_better": True}
    trainer = trainer_for(
        tmp_path, lambda _: {"score": next(scores)}, [EarlyStoppingCallback(2)], max_steps=16, **changes
    )
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.75, 4)
    assert type(trainer.state.best_metric) is float
    assert trainer.state.global_step == 8, "two evaluations without improvement"
