"""Run by the launcher, or imported: a Trainer that goes on from its newest checkpoint, and a rank killed once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback

UPDATES, SAMPLES, UPDATE_SIZE = 8, 24, 8


class KilledOnce(TrainerCallback):
    """Rank 1 is killed in update 5, unless it has been before."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 1 and state.global_step == 5 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, world: int) -> Trainer:
    args = arguments(
        folder, max_steps=UPDATES, save_strategy="steps", save_steps=2, logging_steps=1,
        per_device_train_batch_size=UPDATE_SIZE // world,
    )  # fmt: skip
    dataset = [{**row, "x": row["x"].double()} for row in rows(SAMPLES)]
    trainer = Trainer(
        Net().double(), args, train_dataset=dataset, callbacks=[KilledOnce(folder / "killed-once")]
    )
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return trainer


if __name__ == "__main__":
    print(f"rank {os.environ['RANK']} of machine {os.environ['GROUP_RANK']}", flush=True)
    train(Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]))
