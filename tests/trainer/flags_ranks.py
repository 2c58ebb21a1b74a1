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


class AtTheBeginning(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


class AtTheEndOfAnEpoch(TrainerCallback):
    """A run that is resumed at its last update has nothing to train before."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = True


def before_the_first_update(folder: Path) -> list[int]:
    stopped = trainer_for(folder / "stopped", max_steps=6, ddp_timeout=30)
    saves = {"save_strategy": "steps", "num_train_epochs": 1, "max_steps": -1}
    trainer_for(folder / "saved", ddp_timeout=30, **saves).train()
    resumed = trainer_for(folder / "saved", eval_dataset=samples(5), ddp_timeout=30, **saves)
    if RANK == 1:
        stopped.add_callback(AtTheBeginning)
        resumed.add_callback(AtTheEndOfAnEpoch)
    stopped.train()
    resumed.train(resume_from_checkpoint=True)
    evaluated = sum("eval_loss" in row for row in resumed.state.log_history)
    return [stopped.state.global_step, evaluated]


def main() -> None:
    folder = Path(sys.argv[1])
    early = before_the_first_update(folder)
    trainer = trainer_for(folder / "run", max_steps=6, eval_dataset=samples(5), ddp_timeout=30)
    if RANK == 1:
        trainer.add_callback(Asking)
    trainer.train()
    logged = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    (folder / f"rank{RANK}.json").write_text(json.dumps([trainer.state.global_step, logged, early]))
    trainer.end()


if __name__ == "__main__":
    main()
