"""Searches of a small model, also as a script: by one process that is killed in a trial, or by two."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import arguments
from torch import Tensor, nn

from windlass import Trainer, TrainerCallback

RATES = [0.5, 0.4, 0.3, 0.2, 1e-6]
SPACE = {"learning_rate": {"low": 0.01, "high": 1.0, "log": True}, "weight_decay": [0.0, 0.1]}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.drop(self.body(x)), labels)}


def rates(trial: Any) -> dict[str, Any]:
    """A space of five trials, of which the last learns nothing."""
    rate = RATES[trial.number]
    return {"learning_rate": trial.suggest_float("learning_rate", rate, rate)}


def rows() -> list[dict[str, Tensor]]:
    return [{"x": torch.tensor([i / 20]), "labels": torch.tensor([2 * i / 20 + 1])} for i in range(20)]


def trainer_of(folder: Path, *callbacks: Any, model_init: Any = Line, **changes: Any) -> Trainer:
    args = arguments(folder, max_steps=6, eval_strategy="steps", eval_steps=2, save_steps=2, save_strategy="steps",
                     logging_steps=2, **changes)  # fmt: skip
    return Trainer(
        None, args, train_dataset=rows(), eval_dataset=rows(), model_init=model_init, callbacks=[*callbacks]
    )


class Dies(TrainerCallback):
    """Kills the process in an update of a trial."""

    def __init__(self, trial: int, step: int) -> None:
        self._trial, self._step = trial, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.trial_name == f"run-{self._trial}" and state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, backend, trial = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    trainer = trainer_of(folder, *([Dies(trial, 5)] if trial >= 0 else []))
    if backend == "median":
        best = trainer.hyperparameter_search(rates, n_trials=len(RATES), backend="random", pruner="median")
    else:
        best = trainer.hyperparameter_search(SPACE, n_trials=4, backend=backend)
    sys.stdout.write(f"best {best}\n")  # whole: ranks share the stream


if __name__ == "__main__":
    main()
