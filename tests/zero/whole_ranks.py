"""Run on ranks: whether parameters of stage 3 stay whole from a forward to its backward, in each update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.small import arguments, rows
from tests.zero.runs import Net, config

from windlass import Trainer

WHOLE: list[bool] = []


class Watched(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **options)
        if model.training:
            WHOLE.append(all(p.ds_status.name == "AVAILABLE" for p in self.model.parameters()))
        return found


def main(folder: Path, evaluated: bool) -> list[bool]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    args = arguments(folder, max_steps=6, eval_on_start=evaluated, **config(3, zero_optimization=zero))
    Watched(Net(), args, train_dataset=rows(40), eval_dataset=rows(9)).train()
    return WHOLE
