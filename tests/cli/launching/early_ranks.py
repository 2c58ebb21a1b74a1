"""Run by the launcher: rank 1 ends with exit code 0 before the others join the process group."""

from __future__ import annotations

import os
import sys

import torch

from windlass.core.world import world_from_environment
from windlass.dist.gang import join

how = sys.argv[1]
if os.environ["RANK"] == "1":
    if how == "exits":
        sys.exit(0)
    if how == "vanishes":
        os._exit(0)
else:
    join(world_from_environment(), torch.device("cpu"))
