"""Train with one tracker, resume, and log from a loop of one's own: `python tracker_runs.py NAME`, in an empty folder.

A process of its own, because trackers keep threads, services and environment variables until it ends. One line of its
output is JSON: the identities of the first and the resumed run.
"""

from __future__ import annotations

import json
import math
import sys
from decimal import Decimal
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Accelerator, Trainer
from windlass.callbacks.tracker import GeneralTracker
from windlass.callbacks.tracking import TrackingCallback

OWN = {1: {"own/loss": 0.1, "own_eval": 3.0}, 2: {"own/loss": 0.3}}


class Unlucky(Trainer):
    """Logs NaN and values that are not numbers at step 3."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if self.state.global_step == 3:
            logs |= {
                "unlucky": math.nan,
                "recall@5": 0.25,
                "exact": Decimal("0.5"),
                "odd": 1j,
                "mixed": {"a": [1, None], "b": b""},
            }
        super().log(logs, start_time)
        package: Any = sys.modules.get("wandb")
        for _ in range(2 if package is not None and package.run is not None else 0):
            package.log({"own": 1.0})  # of the script, without a step, which moves the run on


def train(name: str, steps: int, resume: str | None = None) -> GeneralTracker:
    args = arguments(
        "out", report_to=[name], run_name="first", project="tests", max_steps=steps, logging_steps=1,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer = Unlucky(Net(), args, train_dataset=rows(32), eval_dataset=rows(8, seed=1))
    trainer.train(resume_from_checkpoint=resume)
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, TrackingCallback))
    return callback.trackers[0]


def log_by_hand(name: str) -> None:
    loop = Accelerator(cpu=True, log_with=name, project_dir="loop")
    loop.init_trackers("tests", config={"lr": 0.1, "name": "small", "deep": True})
    for step, values in OWN.items():
        loop.log(values, step=step)
    loop.end_training()


def main(name: str) -> None:
    first = train(name, 4).run_id
    resumed = train(name, 6, resume="out/checkpoint-4")
    print(json.dumps({"first": first, "resumed": resumed.run_id}), flush=True)
    resumed.finish()
    log_by_hand(name)


if __name__ == "__main__":
    main(sys.argv[1])
