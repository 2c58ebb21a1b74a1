"""Run by a test on two ranks: the second one's loss raises, while the first reads data until the second has ended."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows
from torch import Tensor

from windlass import Trainer

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
LOCK = (FOLDER / "lock").open("a")


def updates() -> int:
    return trainer.state.global_step


class Data:
    """Samples, some of which rank 0 can read only when rank 1 has ended."""

    def __init__(self) -> None:
        self._rows = rows(48)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if RANK == 0 and updates() == 1:  # reads for the update that follows the failing one
            fcntl.flock(LOCK, fcntl.LOCK_EX)
        return self._rows[index]


class Fails(Net):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if RANK == 1 and updates() == 1:
            raise ValueError("my own mistake")
        return super().forward(x, labels)


if __name__ == "__main__":
    if RANK == 1:  # held until its process has ended
        fcntl.flock(LOCK, fcntl.LOCK_EX)
    args = arguments(FOLDER / "run", max_steps=6, ddp_timeout=600)
    trainer = Trainer(Fails(), args, train_dataset=Data())
    trainer.train()
