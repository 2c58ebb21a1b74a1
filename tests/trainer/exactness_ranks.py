"""Run by `torch.distributed.run`: every kind of loss, in every split of the update that this world has, replicated or
sharded.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tests.trainer.exactness_cases import EPOCHS, KINDS, SPLITS, UNEVEN, UNEVEN_SPLIT, train

from windlass import ModelError

STRATEGIES = {
    "replicated": {},
    "sharded": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 150}},
}
# A sharded model cannot keep gradients of auxiliary terms separately.
REFUSED = ("sharded", "weighted terms with parts")


def main() -> None:
    torch.set_default_dtype(torch.float64)
    place, world, strategy = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), sys.argv[2]
    run = functools.partial(train, place=place / "run", epochs=EPOCHS[world], **STRATEGIES[strategy])
    outcomes = {
        name: {
            f"{micro} x {accumulation}": run(kind, micro=micro, accumulation=accumulation)
            for micro, accumulation in SPLITS[world]
            if accumulation == 1 or (strategy, name) != REFUSED
        }
        for name, kind in KINDS.items()
    }
    if world == 2:
        for name, kind in KINDS.items():
            if (strategy, name) != REFUSED:
                outcomes[name][UNEVEN_SPLIT] = run(kind, micro=2, accumulation=3, rows=UNEVEN)
    if strategy == REFUSED[0]:
        with pytest.raises(ModelError, match="needs separate gradients"):
            run(KINDS[REFUSED[1]], micro=2, accumulation=3)
    rank = os.environ["RANK"]
    (place / f"rank{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
