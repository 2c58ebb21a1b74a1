"""Run in two processes without a launcher: rank 0 dies while it reads, and rank 1 must not wait for it."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from windlass.config.loop_options import DataLoaderConfiguration
from windlass.core.world import world_from_environment
from windlass.data.prepare_loader import prepare_loader
from windlass.dist.gang import join

DISPATCHED = sys.argv[1] == "dispatched"


class Deadly(IterableDataset[Any]):
    """A stream of batches of unknown number, in which rank 0 ends like a process that is killed."""

    def __iter__(self) -> Any:
        for i in range(100):
            if i == 9 and os.environ["RANK"] == "0":
                os._exit(9)
            yield torch.full((2,), i)


def main() -> None:
    world, cpu = world_from_environment(), torch.device("cpu")
    loader = prepare_loader(
        DataLoader(Deadly(), batch_size=None),
        ranks=world.size,
        rank=world.rank,
        device=cpu,
        options=DataLoaderConfiguration(dispatch_batches=DISPATCHED),
        data_ranks=join(world, cpu),
    )
    try:
        for number, _ in enumerate(loader):
            print(f"batch {number}", flush=True)
    except Exception as error:
        print(f"noticed: {type(error).__name__}", flush=True)
        os._exit(3)


if __name__ == "__main__":
    main()
