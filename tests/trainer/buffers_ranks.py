"""Run by `torch.distributed.run`: every rank keeps buffers of its own, which its gradients depend on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.test_losses import Model, trainer_for
from torch import Tensor


class Centred(Model):
    """Takes a running mean of its inputs off them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return super().forward(x - self.mean, labels)


def weights(folder: Path, resume: str | None = None) -> Any:
    torch.manual_seed(0)
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "ddp_timeout": 30}
    trainer = trainer_for(folder, model=Centred(), ddp_broadcast_buffers=False, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return [p.tolist() for p in trainer.model.parameters()]


def main() -> None:
    folder = Path(sys.argv[1])
    whole = weights(folder / "whole")
    resumed = weights(folder / "resumed", str(folder / "whole" / "checkpoint-2"))
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps([whole, resumed]))


if __name__ == "__main__":
    main()
