"""A run of its own process: saves at every update, waits for a word after the third, and goes on to the sixth."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.trainer.background_cases import trainer_of

from windlass import TrainerCallback


class Waiting(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            print("saved the third", flush=True)
            sys.stdin.readline()


def main() -> None:
    trainer = trainer_of(
        Path(sys.argv[1]), Waiting(), max_steps=6, save_steps=1, save_total_limit=2, logging_steps=1
    )
    trainer.train()
    print("done", flush=True)


if __name__ == "__main__":
    main()
