"""Run by a test on two ranks that divide each row: the second one fails alone within a forward of an evaluation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import arguments, llama

from windlass import Trainer, TrainerCallback


class FailsInEvaluation(TrainerCallback):
    """Not in the first forwards, which measure the loss."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        def fail(*_: Any) -> None:
            raise ValueError("my own mistake")

        if os.environ["RANK"] == "1":
            model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(fail)


if __name__ == "__main__":
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "parallelism_config": {"cp_size": 2},
    }
    args = arguments(Path(sys.argv[1]), max_steps=2, ddp_timeout=60, **options)
    data = [{"input_ids": list(range(2, 10)), "labels": list(range(2, 10))}] * 8
    Trainer(llama(), args, train_dataset=data, eval_dataset=data, callbacks=[FailsInEvaluation]).train()
