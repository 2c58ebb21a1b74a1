"""Run by `torch.distributed.run`: the output folder can't be made; every rank says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.trainer.nonfinite_cases import Weights, trainer_for

from windlass import ConfigError


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "a file").touch()
    trainer = trainer_for(folder / "a file" / "out", None, Weights())
    try:
        trainer.train()
    except ConfigError as error:
        (folder / f"rank{os.environ['RANK']}.txt").write_text(str(error))
    trainer.end()


if __name__ == "__main__":
    main()
