"""Run by `torch.distributed.run`, or imported: one stretch of a run that changes its number of processes on the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback

SAMPLES, MICRO = 44, 4


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = control.should_training_stop = state.global_step == self.step
        return control


def stretch(folder: Path, stop: int, resume: bool, **changes: Any) -> Trainer:
    """Go on to update `stop`, and save there."""
    options = {"max_steps": 12, "logging_steps": 1, "per_device_train_batch_size": MICRO, **changes}
    args = arguments(folder, save_strategy="steps", save_steps=100, **options)
    trainer = Trainer(
        Net().double(), args, train_dataset=[{**row, "x": row["x"].double()} for row in rows(SAMPLES)],
        callbacks=[StopAt(stop)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    stretch(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume").end()
