"""A small job that writes down which addresses it and its launcher listen on while a process group is open."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.cli.launching.listeners import listening
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer


def look(folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from windlass.dist.gang import current

    rank = os.environ["RANK"]
    args = arguments(Path(folder) / "run", max_steps=1, use_cpu=True)
    Trainer(Net(), args, train_dataset=rows(16)).train()
    current()
    init_device_mesh("cpu", (dist.get_world_size(),))
    dist.new_group(backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    found = {"rank": sorted(listening()), "launcher": sorted(listening(os.getppid()))}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    look(sys.argv[1])
