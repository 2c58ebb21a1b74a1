"""A run that is slow where it is told to be, and may be killed at an update. Its folder and the update are arguments."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback

DATA, SAVE = 0.02, 0.5


class SlowRows:
    """Rows that take a while to read."""

    def __init__(self, count: int) -> None:
        self._rows = rows(count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        time.sleep(DATA / 4)
        return self._rows[index]


class Killer(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            time.sleep(1.2)  # longer than the clock is from being written
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.03)
        return super().compute_loss(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(SAVE)
        super()._save_checkpoint(*args, **kwargs)


def main(folder: Path, kill_at: int) -> None:
    options = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "logging_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    trainer = Slow(
        Net(), arguments(folder, **options), train_dataset=SlowRows(64), callbacks=[Killer(kill_at)]
    )
    trainer.train(resume_from_checkpoint="auto")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
