"""Run by `windlass launch`: a run in fp16 under a stage of ZeRO; what came of it, as JSON.

Args: folder, words NAME:STAGE:STEPS[:resume], then "anyway" to compute in fp16 on a device that DeepSpeed does not
list as capable of it: the arithmetic is there, only slow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.trainer.small import arguments, llama, text_rows
from tests.zero.runs import RANK, WORLD, config

from windlass import Trainer

SCALING = {"enabled": "auto", "initial_scale_power": 30, "hysteresis": 1, "loss_scale_window": 4}


def main() -> None:
    folder, *words = sys.argv[1:]
    if words[-1] == "anyway":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
        words.pop()
    for word in words:
        name, stage, steps, *resume = word.split(":")
        args = arguments(
            Path(folder) / name, per_device_train_batch_size=2, gradient_accumulation_steps=4 // WORLD,
            max_steps=int(steps), logging_steps=1, save_strategy="steps", save_steps=12, learning_rate=0.01,
            fp16=int(stage) >= 0, lr_scheduler_type="constant", **config(int(stage), fp16=SCALING),
        )  # fmt: skip
        trainer = Trainer(llama(), args, train_dataset=text_rows(40))
        trainer.train(resume_from_checkpoint=bool(resume))
        rows = [row for row in trainer.state.log_history if "loss" in row]
        found = {key: [row[key] for row in rows] for key in ("loss", "grad_norm")}
        if RANK == 0:
            (Path(folder) / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
