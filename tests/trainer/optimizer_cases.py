"""Runs with a given optimizer: whole, and stopped and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import arguments, rows
from torch import Tensor, nn

from windlass import Trainer
from windlass.dist.sharded import whole

# One of each family. The matrices of `Layers` are large enough for averages in 8 and 4 bits.
FAMILIES = [
    "adamw_torch", "adafactor", "muon", "lion_32bit", "ademamix", "stable_adamw", "grokadamw", "adamw_anyprecision",
    "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd", "adamw_torch_8bit", "adamw_torch_4bit",
    "galore_adamw_8bit", "galore_adafactor", "apollo_adamw",
]  # fmt: skip
IN_8_BITS = ["adamw_8bit", "paged_adamw_8bit", "lion_8bit", "ademamix_8bit", "rmsprop_bnb_8bit"]
PROJECTING = ("galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
OPTIONS = {
    "adamw_anyprecision": "use_kahan_summation=True",
    "schedule_free_radam": "silent_sgd_phase=False",
    **dict.fromkeys(PROJECTING, "rank=48, update_proj_gap=2"),
    # The gradient has 8 directions. Adafactor's update is as large in any other, where rounding alone decides.
    "galore_adafactor": "rank=8, update_proj_gap=2",
}


class Layers(nn.Module):
    """A classifier with a hidden matrix of `width ** 2` elements."""

    def __init__(self, width: int = 96, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(4, width)
        self.layers = nn.ModuleList([nn.Linear(width, width)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)
        self.to(dtype)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.first(x.to(self.first.weight.dtype)))
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        logits = self.head(self.norm(hidden)).float()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def run(
    folder: Path, optim: str, steps: int, *, resume: bool = False, watched: bool = True, **changes: Any
) -> Trainer:
    """A run to update `steps`.

    Args:
        watched: evaluate after each second update, and save after each third.
    """
    cadence = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    changes = {"weight_decay": 0.1, "lr_scheduler_type": "constant", "learning_rate": 0.01, **changes}
    if optim in OPTIONS:
        changes.setdefault("optim_args", OPTIONS[optim])
    if optim in PROJECTING:
        changes.setdefault("optim_target_modules", ["layers"])
    args = arguments(
        folder,
        optim=optim,
        max_steps=steps,
        num_train_epochs=1,
        **{**(cadence if watched else {}), **changes},
    )
    data = rows(48, classes=4)
    trainer = Trainer(Layers(), args, train_dataset=data, eval_dataset=data[:8])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Trainer) -> list[Tensor]:
    return [whole(parameter).detach().clone() for parameter in trainer.model.parameters()]


def resumes_to_the_bit(folder: Path, optim: str, **changes: Any) -> bool:
    """Whether a run that is stopped after update 4 of 7 and continued from 3 ends as an uninterrupted one."""
    whole_run = weights(run(folder / "whole", optim, 7, watched=False, **changes))
    run(folder / "parts", optim, 4, **changes)
    continued = weights(run(folder / "parts", optim, 7, resume=True, **changes))
    moved = not torch.equal(whole_run[2], Layers().layers[0].weight)
    return moved and all(torch.equal(a, b) for a, b in zip(whole_run, continued, strict=True))
