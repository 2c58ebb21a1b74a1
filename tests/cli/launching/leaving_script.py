"""Trains under a launcher; at an update of the first attempt some process, or the launcher, gets a signal.

    leaving_script.py FOLDER WHOM [TIMES]

WHOM is "launcher0" (that of rank 0), "launcher1", "rank1" or "none".
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows, weights_hash

from windlass import Preempted, Trainer, TrainerCallback

FOLDER, WHOM = Path(sys.argv[1]), sys.argv[2]
TIMES = int(sys.argv[3]) if len(sys.argv) > 3 else 1
RANK = int(os.environ["RANK"])


class Tell(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        told = FOLDER / "told"
        if state.global_step != 3 or not WHOM.endswith(str(RANK)) or told.exists():
            return
        told.touch()
        for _ in range(TIMES):
            if WHOM.startswith("launcher"):
                os.kill(os.getppid(), signal.SIGTERM)
            elif WHOM == "rank1":
                os.kill(os.getpid(), signal.SIGUSR1)


data = [{**row, "x": row["x"].double()} for row in rows(80)]
args = arguments(FOLDER / "run", max_steps=10, save_strategy="steps", save_steps=5, ddp_timeout=60)
trainer = Trainer(Net().double(), args, train_dataset=data, callbacks=[Tell()])
try:
    trainer.train(resume_from_checkpoint="auto")
except Preempted as left:
    (FOLDER / f"left-{RANK}").write_text(str(left.step))
    raise
if RANK == 0:
    (FOLDER / "hash").write_text(weights_hash(trainer.model))
