"""Run on ranks: trainings under a stage of ZeRO, and without DeepSpeed; what they came to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import arguments, llama, rows, text_rows
from torch import nn

from windlass import Trainer, TrainerCallback
from windlass.core.errors import ModelError

RANK, WORLD = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


class Net(nn.Module):
    """Odd sizes, so that parts end within rows; a bias that is frozen, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.norm, self.head = nn.Linear(4, 7), nn.BatchNorm1d(7, momentum=0.2), nn.Linear(7, 3)
        self.inner.bias.requires_grad_(False)
        # With its columns one behind another in memory.
        self.head.weight = nn.Parameter(self.head.weight.detach().T.contiguous().T)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.norm.eval()  # whose batch statistics would depend on the number of ranks
        logits = self.head(torch.tanh(self.norm(self.inner(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def config(stage: int, **others: Any) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": {"stage": stage}, **AUTO, **others}} if stage >= 0 else {}


def trainer(folder: Path, stage: int, steps: int = 7, **changes: Any) -> Trainer:
    """Updates of 12 samples on any number of ranks, the last of an epoch shorter; clipped, with weight decay."""
    changes = {"max_steps": steps, "weight_decay": 0.1, "logging_steps": 1, **config(stage), **changes}
    args = arguments(
        folder,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4 // WORLD,
        max_grad_norm=0.5,
        **changes,
    )
    return Trainer(Net(), args, train_dataset=rows(50), eval_dataset=rows(11, seed=1))


def unfreezing(folder: Path) -> list[str]:
    """The errors at stages 1 and 3 of runs in which a frozen bias requires gradients after an update."""

    class Unfreezes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.inner.bias.requires_grad_(True)

    errors = []
    for stage in (1, 3):
        run = trainer(folder / str(stage), stage, steps=2)
        run.add_callback(Unfreezes())
        try:
            run.train()
        except ModelError as error:
            errors.append(str(error))
    return errors


def language_trainer(folder: Path, stage: int, steps: int, **changes: Any) -> Trainer:
    """A tiny language model of transformers, in bf16."""
    changes = {"max_steps": steps, "bf16": True, "logging_steps": 1, **config(stage), **changes}
    args = arguments(folder, per_device_train_batch_size=2, gradient_accumulation_steps=4 // WORLD, **changes)
    return Trainer(llama(tied=True), args, train_dataset=text_rows(40))


def told(made: Trainer) -> dict[str, Any]:
    """Losses, norms and learning rates of a run, and its whole weights."""
    made.save_model()
    rows = [row for row in made.state.log_history if "loss" in row]
    return {key: [row[key] for row in rows] for key in ("loss", "grad_norm", "learning_rate")}


def twice(folder: Path, stage: int) -> dict[str, Any]:
    """A trainer that trains two times, which continues with the optimizer's state."""
    made = trainer(folder, stage, steps=4)
    made.train()
    first = told(made)["loss"]
    evaluation = made.evaluate()["eval_loss"]
    assert made.optimizer is not None
    assert {id(p) for group in made.optimizer.param_groups for p in group["params"]} <= set(
        map(id, made.model.parameters())
    )
    made.optimizer.state_dict()
    made.train()
    return {**told(made), "first": first, "between": evaluation, "evaluation": made.evaluate()["eval_loss"]}


def trained(folder: Path, stage: int) -> dict[str, Any]:
    made = trainer(folder, stage)
    made.train()
    return {**told(made), "evaluation": made.evaluate()["eval_loss"]}
