"""Run by `torch.distributed.run`: callbacks of one rank ask for a save, an evaluation, and the end of the run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.trainer.test_losses import samples, trainer_for

from windlass import TrainerCallback

RANK = int(os.environ["RANK"])


class Asking(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == 1
        control.should_evaluate |= state.global_step == 2

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def main() -> None:
    folder = Path(sys.argv[1])
    trainer = trainer_for(folder / "run", max_steps=6, eval_dataset=samples(5), ddp_timeout=30)
    if RANK == 1:
        trainer.add_callback(Asking)
    trainer.train()
    logged = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    (folder / f"rank{RANK}.json").write_text(json.dumps([trainer.state.global_step, logged]))
    trainer.end()


if __name__ == "__main__":
    main()
