"""A callback that evaluates or logs leaves the run as it was: its schedule, its reports, its randomness, its bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.small import Net, arguments, rows, weights_hash

from windlass import EarlyStoppingCallback, Trainer, TrainerCallback


class Dropping(Net):
    """Draws in every forward of training."""

    def forward(self, x: Any, labels: Any = None) -> Any:
        return super().forward(torch.nn.functional.dropout(x, 0.2, self.training), labels)


def noisy(samples: list[Any]) -> dict[str, Any]:
    """A collator that draws from all three generators that a script may use."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return {
        "x": torch.stack([s["x"] for s in samples]) + 0.01 * noise,
        "labels": torch.tensor([s["labels"] for s in samples]),
    }


def drawing(prediction: Any) -> dict[str, float]:
    random.random(), np.random.rand(), torch.rand(3)
    return {"drawn": 1.0}


class Side(TrainerCallback):
    """Evaluates, predicts and logs at an event, under names of its own."""

    def __init__(self, event: str) -> None:
        self.trainer: Any = None
        self.busy = False
        setattr(self, event, self.call)

    def call(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.busy:
            self.busy = True
            self.trainer.evaluate(metric_key_prefix="side")
            self.trainer.evaluate(rows(4, seed=2), metric_key_prefix="eval_other")
            self.trainer.predict(rows(4, seed=3))
            self.trainer.log({"side": 1.0})
            self.busy = False


def run(folder: Path, event: str | None, *, first: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    args = arguments(
        folder,
        max_steps=-1,
        num_train_epochs=3,
        logging_steps=2,
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
    )
    side = Side(event or "on_init_end")
    trainer = Trainer(
        Dropping(),
        args,
        data_collator=noisy,
        train_dataset=rows(16),
        eval_dataset=rows(6, seed=1),
        compute_metrics=drawing,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    side.trainer = trainer
    if event is not None:
        if first:  # before the callback that asks for reports
            trainer.callback_handler.callbacks.insert(0, side)
        else:
            trainer.add_callback(side)
        trainer.callback_handler.refresh()
    trainer.train()
    timeless = [
        {name: value for name, value in row.items() if "runtime" not in name and "per_second" not in name}
        for row in trainer.state.log_history
        if not any(name.startswith(("side", "eval_other")) for name in row)
    ]
    saved = sorted(path.name for path in folder.glob("checkpoint-*"))
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    return timeless, saved, weights_hash(trainer.model), trainer.state.best_global_step, drawn


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    return run(tmp_path_factory.mktemp("alone"), None)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    "event",
    [
        "on_step_begin",
        "on_step_end",
        "on_log",
        "on_evaluate",
        "on_save",
        "on_epoch_end",
        "on_pre_optimizer_step",
    ],
)
def test_calls_of_a_callback_leave_the_run_as_it_was(
    event: str, first: bool, folder: Path, alone: tuple[Any, ...]
) -> None:
    found = run(folder, event, first=first)
    for ours, theirs in zip(found, alone, strict=True):
        assert ours == theirs
