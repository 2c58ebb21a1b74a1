"""Run on ranks, or imported: a run whose callback unfreezes a layer, and gives it to the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import arguments, rows
from torch import Tensor, nn

from windlass import Trainer, TrainerCallback
from windlass.core.errors import ModelError
from windlass.dist.sharded import whole


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.first.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(x)))
        return (
            {"loss": nn.functional.cross_entropy(logits, labels)}
            if labels is not None
            else {"logits": logits}
        )


class Unfreezes(TrainerCallback):
    """The layer gets gradients from update 2 on, and is trained from update 3 on."""

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == 1:
            model.first.requires_grad_(True)
        if state.global_step == 2:
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.2})


def samples() -> list[dict[str, Any]]:
    return [{**row, "x": row["x"].double()} for row in rows(24)]


def train(folder: Path, **changes: Any) -> list[Tensor]:
    """The weights after six updates of four samples."""
    options = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.3}
    settings = {"max_steps": 6, "train_sampling_strategy": "sequential", **options, **changes}
    trainer = Trainer(
        TwoLayers(), arguments(folder, **settings), train_dataset=samples(), callbacks=[Unfreezes()]
    )
    trainer.train()
    return [whole(p.detach()).flatten() for p in trainer.model.parameters()]


KINDS = {"shards": {"fsdp": True}, "replicas": {}, "in the backward": {"optim": "lomo"}}


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, changes in KINDS.items():
        try:
            weights = train(folder / kind, per_device_train_batch_size=2, **changes)
            found[kind] = [weight.tolist() for weight in weights]
        except ModelError as error:
            found[kind] = str(error)
    return found
