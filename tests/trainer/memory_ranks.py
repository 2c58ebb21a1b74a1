"""Run by `torch.distributed.run`, which starts it again: a rank runs out of memory, in evaluation, then in training."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.trainer.memory_cases import Samples, flat, hungry, trainer_for

from windlass import TrainerCallback

RANK = int(os.environ["RANK"])
SIZES: dict[str, Any] = {
    "per_device_train_batch_size": 6,
    "per_device_eval_batch_size": 6,
    "save_steps": 1,
    "save_in_background": False,
    "max_steps": 5,
}


class LessRoom(TrainerCallback):
    """From the third update on, one rank has room for three rows."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.limit = 3 if RANK and state.global_step >= 2 else 99


def main() -> None:
    folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = hungry(99, eval_limit=3 if RANK else 99)
    trainer = trainer_for(folder / "run", model, **SIZES)
    trainer.add_callback(LessRoom)
    before = trainer.evaluate(Samples())["eval_loss"]
    saved = list((folder / "run").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint="auto")
    clean = trainer_for(
        folder / "clean",
        hungry(99),
        **{**SIZES, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    )
    expected = clean.evaluate(Samples())["eval_loss"]
    clean.train()
    said = {
        "attempt": attempt,
        "resumed": len(saved),
        "micro": [len(ids) for ids in model.seen],
        "eval": [before, expected, trainer.get_eval_dataloader().batch.micro],
        "weights": [flat(trainer.model).tolist(), flat(clean.model).tolist()],
    }
    (folder / f"rank{RANK}.json").write_text(json.dumps(said))
    trainer.end()


if __name__ == "__main__":
    main()
