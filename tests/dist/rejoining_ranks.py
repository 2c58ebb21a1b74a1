"""Run on ranks: processes that meet again while one of them still leaves."""

from __future__ import annotations

import os
import time

import torch

from windlass.core.world import world_from_environment
from windlass.dist.gang import join, leave

MEETINGS, LATE_SECONDS = 4, 0.5


def main(port: int | None = None) -> None:
    if port is not None:  # of a launcher's store
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    world = world_from_environment()
    for meeting in range(MEETINGS):
        gang = join(world, torch.device("cpu"), 20)
        assert gang.gather_objects((meeting, world.rank)) == [(meeting, 0), (meeting, 1)]
        if world.rank == meeting % 2:
            time.sleep(LATE_SECONDS)
        leave()
