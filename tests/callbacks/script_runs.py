"""Train twice, and log from a loop, beside a run that this script opened: `python script_runs.py NAME`.

In an empty folder. Prints the identities of the script's run, of those that the trackers had, and of the run that is
open at the end.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Accelerator, Trainer
from windlass.callbacks.tracking import TrackingCallback


def opened(name: str) -> str | None:
    """The identity of the run that is open now."""
    package: Any = importlib.import_module(name)
    run = package.active_run() if name == "mlflow" else package.run
    return None if run is None else str(run.info.run_id if name == "mlflow" else run.id)


def trained(name: str, number: int) -> str | None:
    args = arguments(f"out-{number}", report_to=[name], max_steps=1, save_strategy="no")
    trainer = Trainer(Net(), args, train_dataset=rows(8))
    trainer.train()
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, TrackingCallback))
    return callback.trackers[0].run_id


def main(name: str) -> None:
    package: Any = importlib.import_module(name)
    _ = package.start_run() if name == "mlflow" else package.init(project="mine")
    found = [opened(name), *(trained(name, number) for number in range(2))]
    loop = Accelerator(cpu=True, log_with=name)
    loop.init_trackers("tests")
    loop.log({"loss": 0.5}, step=9)
    loop.end_training()
    print(json.dumps([*found, opened(name)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
