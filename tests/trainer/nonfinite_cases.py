"""A model that breaks down at one known sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass import Trainer, TrainerCallback, TrainingArguments

BAD = 13  # in the sixth pair, for one process with batches of two


class Fragile(nn.Module):
    """A linear regression whose loss at a sample that is not finite is not finite either."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x).squeeze(-1)
        return (out - labels).square().mean(), out


class Undefined(Fragile):
    """Finite data whose loss is not (x[0] above 500), or whose gradient alone is not (x[0] below -500)."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, out = super().forward(x, labels)
        if bool((x[:, 0] > 500).any()):
            loss = loss * torch.nan
        if bool((x[:, 0] < -500).any()):
            loss = loss + (out.sum() * 0).sqrt()
        return loss, out


def samples(bad: float | None, count: int = 24) -> list[dict[str, Any]]:
    torch.manual_seed(3)
    made = [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(count)]
    if bad is not None:
        made[BAD]["x"][1] = bad
    return made


class Weights(TrainerCallback):
    """The weights after each update, and what was logged."""

    def __init__(self) -> None:
        self.after: list[list[float]] = []
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after.append(model.layer.weight.detach().flatten().tolist())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def faulty_on_both_ranks(folder: Path, fault: float, column: int, **changes: Any) -> Trainer:
    """A run of two ranks, each with one faulty sample in the update that holds 12 to 15: 13 and 14."""
    trainer = trainer_for(folder, None, None, **changes)
    model = Undefined()
    run = Trainer(model, trainer.args, train_dataset=samples(None))
    for index in (BAD, BAD + 1):
        run.train_dataset[index]["x"][column] = fault
    return run


def trainer_for(folder: Path, bad: float | None, watcher: Weights | None, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    chosen: dict[str, Any] = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 1,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "ddp_timeout": 60,
    }
    args = TrainingArguments(output_dir=str(folder), **{**chosen, **changes})
    return Trainer(Fragile(), args, train_dataset=samples(bad), callbacks=[watcher] if watcher else [])
