"""Run by `torch.distributed.run`: every kind of loss, in every split of the update that this world has, replicated or
sharded.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tests.trainer.exactness_cases import KINDS, SPLITS, UNEVEN, UNEVEN_SPLIT, Kind, train

from windlass import ModelError

STRATEGIES = {
    "replicated": {},
    "sharded": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 150}},
}
# Gradients kept apart are what a sharded model does not have.
REFUSED = ("sharded", "weighted terms with parts")


def main() -> None:
    torch.set_default_dtype(torch.float64)
    world, strategy = int(os.environ["WORLD_SIZE"]), sys.argv[2]
    outcomes = {
        name: {
            f"{micro} x {accumulation}": train(kind, micro, accumulation, **STRATEGIES[strategy])
            for micro, accumulation in SPLITS[world]
            if accumulation == 1 or (strategy, name) != REFUSED
        }
        for name, kind in KINDS.items()
    }
    if world == 2:
        for name, kind in KINDS.items():
            if (strategy, name) != REFUSED:
                outcomes[name][UNEVEN_SPLIT] = train(kind, 2, 3, UNEVEN, **STRATEGIES[strategy])
    if strategy == REFUSED[0]:
        refuses(KINDS[REFUSED[1]])
    rank = os.environ["RANK"]
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(outcomes))


def refuses(kind: Kind) -> None:
    with pytest.raises(ModelError, match="kept apart"):
        train(kind, 2, 3, **STRATEGIES["sharded"])


if __name__ == "__main__":
    main()
