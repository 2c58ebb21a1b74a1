"""Run by `windlass launch`: whether parameters of stage 3 stay whole from a forward to its backward, in each update."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import arguments, rows
from tests.zero.runs import RANK, Net, config

from windlass import Trainer

WHOLE: list[bool] = []


class Watched(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **options)
        if model.training:
            WHOLE.append(all(p.ds_status.name == "AVAILABLE" for p in self.model.parameters()))
        return found


def main() -> None:
    folder = Path(sys.argv[1])
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    args = arguments(
        folder, max_steps=6, eval_on_start="evaluated" in sys.argv, **config(3, zero_optimization=zero)
    )
    Watched(Net(), args, train_dataset=rows(40), eval_dataset=rows(9)).train()
    if RANK == 0:
        (folder / "whole.json").write_text(json.dumps(WHOLE))


if __name__ == "__main__":
    main()
