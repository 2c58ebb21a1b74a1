"""Mistakes in jobs of two processes: what a user reads is what both have printed."""

from __future__ import annotations

from pathlib import Path

from tests.dist.launch import launch
from tests.reliability.mistakes.mistake import LINES, Answer, Mistake

HEAD = """\
import os

import torch
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from pathlib import Path

RANK = int(os.environ["RANK"])
"""


def of_two(name: str, script: str, *expected: str) -> Mistake:
    """A mistake of a script that two processes run."""

    def make(folder: Path) -> Answer:
        file = folder / "script.py"
        file.write_text(HEAD + script)
        printed = launch(2, file, expect=1, cwd=folder).strip().splitlines()
        return Answer("\n".join(printed[-LINES:]), raised=True)

    return Mistake(name, expected, make)


RANKS = (
    of_two(
        "Data that each process draws for itself",
        "Trainer(Net(), arguments(Path('run')), train_dataset=rows(8, seed=RANK)).train()",
        "train_dataset: rows [0, 4, 7]", "on rank 0", "on rank 1", "without a seed",
    ),
    of_two(
        "Data that the script divides among the processes",
        "Trainer(Net(), arguments(Path('run')), train_dataset=rows(16)[RANK::2]).train()",
        "train_dataset", "on rank 0", "on rank 1", "divided by the script",
    ),
    of_two(
        "A setting that depends on the rank",
        "Trainer(Net(), arguments(Path('run'), learning_rate=1e-3 * (1 + RANK)), train_dataset=rows(8)).train()",
        "learning_rate: 0.001 on rank 0, 0.002 on rank 1",
    ),
)  # fmt: skip
