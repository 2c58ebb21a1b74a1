"""A run that is slow in planned places, and may be killed after an update. Folder and update are arguments."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback

# Seconds that were really slept, by kind.
slept: Counter[str] = Counter()


def sleep(kind: str, seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    slept[kind] += time.perf_counter() - began


class SlowRows:
    """Rows that take a while to read."""

    def __init__(self, count: int) -> None:
        self._rows = rows(count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        sleep("data", 0.005)
        return self._rows[index]


class Killer(TrainerCallback):
    def __init__(self, step: int, folder: Path) -> None:
        self.step, self._folder = step, folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            sleep("callbacks", 1.5)  # the clock is written once a second
            self.report()
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> None:
        with open(self._folder / "slept.jsonl", "a") as file:
            file.write(json.dumps(slept) + "\n")


class Slow(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        sleep("compute", 0.02)
        return super().compute_loss(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        sleep("save", 0.5)
        super()._save_checkpoint(*args, **kwargs)


def main(folder: Path, kill_at: int) -> None:
    options = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "logging_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    killer = Killer(kill_at, folder)
    trainer = Slow(Net(), arguments(folder, **options), train_dataset=SlowRows(64), callbacks=[killer])
    trainer.train(resume_from_checkpoint="auto")
    killer.report()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
