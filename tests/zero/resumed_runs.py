"""Run by `windlass launch`: runs under ZeRO that are stopped and continued.

Args: folder, then words FOLDER:STAGE:STEPS[:resume], in this order, each of which is a run of the folder to that step.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.zero.runs import trainer


def main() -> None:
    folder = Path(sys.argv[1])
    for word in sys.argv[2:]:
        name, stage, steps, *resume = word.split(":")
        saving = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant"}
        made = trainer(folder / name, int(stage), int(steps), **saving)
        made.train(resume_from_checkpoint=bool(resume))


if __name__ == "__main__":
    main()
