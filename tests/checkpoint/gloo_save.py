"""What each of several real processes does in `test_manager.py`: a save that works, one that
fails on the last rank, one more.

Usage: torchrun gloo_save.py ROOT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.checkpoint.faults import CountingFiles, failing, state_of, write_model_of

from windlass.checkpoint.content import Content
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.store import Store
from windlass.core.world import World
from windlass.dist.gang import Gang


class Processes(Gang):
    def vote(self, ok: bool) -> bool:
        agreed = torch.tensor(int(ok))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed)

    def barrier(self) -> None:
        dist.barrier()


def save(root: Path, step: int, files: Files) -> str | None:
    rank, world = dist.get_rank(), dist.get_world_size()
    store = Store(root, all_ranks=Processes(World(rank, world, rank, world)), files=files)
    path = CheckpointManager(store, Retention(1)).save(
        step,
        Content(
            {"optimizer": state_of(step)},
            {"rng": state_of(step) | {"rank": rank}},
            write_model=write_model_of(step, files),
        ),
        meta={"best_metric": float(step)},
    )
    return path and path.name


def main() -> None:
    root = Path(sys.argv[1])
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    saved = [
        save(root, 1, Files()),
        save(root, 2, CountingFiles(2, failing()) if last else Files()),
        save(root, 3, Files()),
    ]
    listed = [info.step for info in Store(root).list()]
    (root / f"result-{dist.get_rank()}").write_text(json.dumps([saved, listed]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
