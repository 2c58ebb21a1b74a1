"""A rank whose first run fails on all ranks, and whose second trains; forked from a notebook that showed an error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Trainer


class Fails(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("on every rank")


def main() -> None:
    sys.last_value = sys.last_exc = KeyError("of an earlier cell")
    folder = Path(sys.argv[1])
    try:
        Fails(Net(), arguments(folder / "failed", ddp_timeout=600), train_dataset=rows(16)).train()
    except ValueError:
        trainer = Trainer(Net(), arguments(folder / "trained", ddp_timeout=600), train_dataset=rows(16))
        print("trained", trainer.train().global_step)
        trainer.end()


if __name__ == "__main__":
    main()
