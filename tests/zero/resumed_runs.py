"""Run on ranks: runs under ZeRO that are stopped and continued.

Args: folder, then words FOLDER:STAGE:STEPS[:resume], each of which is a run of the folder to that step; in bf16 where
the stage ends in "b".
"""

from __future__ import annotations

from pathlib import Path

from tests.zero.runs import language_trainer, trainer


def main(folder: Path, *words: str) -> None:
    for word in words:
        name, stage, steps, *resume = word.split(":")
        saving = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant"}
        make = language_trainer if stage.endswith("b") else trainer
        made = make(folder / name, int(stage.rstrip("b")), int(steps), **saving)
        made.train(resume_from_checkpoint=bool(resume))
        made.save_model()
