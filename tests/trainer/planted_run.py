"""A run on a clock that moves only where it is planted to, and that may be killed after an update.

Arguments: folder, the update after which it is killed (0: none), whether rank 1 is slow.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback
from windlass.callbacks.clock_file import read_clock
from windlass.core.run_clock import run_clock

STEPS, SAVE_STEPS = 12, 4
# Of an update: reading four rows, and the forward.
ROW, FORWARD, SAVE, STRAGGLER = 0.3 / 4, 0.7, 0.5, 2.0
RANK = int(os.environ.get("RANK", "0"))

planted: Counter[str] = Counter()
now = 0.0


def spend(kind: str, seconds: float) -> None:
    """Move the clock, instead of waiting."""
    global now
    now += seconds
    planted[kind] += seconds


class SlowRows:
    """Rows that take a while to read."""

    def __init__(self, count: int) -> None:
        self._rows = rows(count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        spend("data", ROW)
        return self._rows[index]


class Slow(Trainer):
    straggles = False

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        spend("compute", FORWARD + STRAGGLER * (self.straggles and RANK == 1))
        return super().compute_loss(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        spend("save", SAVE)
        super()._save_checkpoint(*args, **kwargs)


class Killer(TrainerCallback):
    """Ends the process at once after an update, when the file of the clock has that update."""

    def __init__(self, step: int, folder: Path) -> None:
        self._step, self._folder = step, folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self.report()
            while (clock := read_clock(self._folder)) is None or clock.step < self._step:
                pass
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> None:
        with open(self._folder / f"planted-{RANK}.jsonl", "a") as file:
            file.write(json.dumps(planted) + "\n")


def main(folder: Path, kill_at: int, straggles: bool) -> None:
    run_clock()._clock = lambda: now
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
    }
    killer = Killer(kill_at, folder)
    data = SlowRows(4 * STEPS * int(os.environ.get("WORLD_SIZE", "1")))
    trainer = Slow(Net(), arguments(folder, **options), train_dataset=data, callbacks=[killer])
    trainer.straggles = straggles
    trainer.train(resume_from_checkpoint="auto")
    killer.report()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
