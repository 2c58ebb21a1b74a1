"""Run by `torch.distributed.run`: one rank's callback raises in the third update."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback


class Fails(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if os.environ["RANK"] == "1" and state.global_step == 2:
            raise ValueError("a callback's own mistake")


if __name__ == "__main__":
    args = arguments(Path(sys.argv[1]), max_steps=6, ddp_timeout=60)
    Trainer(Net(), args, train_dataset=rows(48), callbacks=[Fails]).train()
