"""Run by `torch.distributed.run`: batches that use parts of a model, with and without accumulation."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tests.trainer.optional_parts_cases import SPLITS, train


def main() -> None:
    torch.set_default_dtype(torch.float64)
    place, rank = Path(sys.argv[1]), os.environ["RANK"]
    found = [train(place / "run", split) for split in SPLITS[2]]
    (place / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
