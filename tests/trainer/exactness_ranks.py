"""Run by `torch.distributed.run`: every kind of loss, in every split of the update that this world has."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tests.trainer.exactness_cases import KINDS, SPLITS, train


def main() -> None:
    torch.set_default_dtype(torch.float64)
    world = int(os.environ["WORLD_SIZE"])
    outcomes = {
        name: {
            f"{micro} x {accumulation}": train(kind, micro, accumulation)
            for micro, accumulation in SPLITS[world]
        }
        for name, kind in KINDS.items()
    }
    rank = os.environ["RANK"]
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
