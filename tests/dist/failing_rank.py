"""Run by a test on two ranks: the first begins a sum that the other never joins, and ends as the argument says."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from windlass.core.world import world_from_environment
from windlass.dist.ending import note_failure
from windlass.dist.gang import join, leave


def main(ends: str) -> None:
    gang = join(world_from_environment(), torch.device("cpu"), timeout_seconds=600)
    other = dist.new_group()
    if os.environ["RANK"] == "1":
        dist.all_reduce(torch.zeros(1), group=other)
        return
    gang.start_sum([1.0])
    try:
        raise ValueError("my own mistake")
    except ValueError:
        if ends == "after leave":
            leave()
            raise
    note_failure()
    sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
