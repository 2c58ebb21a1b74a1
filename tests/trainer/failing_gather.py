"""Run by a test on two ranks: the second one has no memory for the second weight that a checkpoint gathers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import Net, arguments, rows
from torch.distributed.tensor import DTensor

from windlass import Trainer

gathered, gather = [], DTensor.full_tensor


def fails(tensor: DTensor, **options: Any) -> torch.Tensor:
    gathered.append(tensor)
    if len(gathered) == 2 and os.environ["RANK"] == "1":
        raise MemoryError("no memory for it")
    return gather(tensor, **options)


if __name__ == "__main__":
    DTensor.full_tensor = fails  # type: ignore[method-assign]
    whole_weights = {"state_dict_type": "FULL_STATE_DICT"}
    args = arguments(Path(sys.argv[1]), max_steps=1, fsdp="full_shard", fsdp_config=whole_weights)
    Trainer(Net(), args.set_save(strategy="steps", steps=1), train_dataset=rows(16)).train()
