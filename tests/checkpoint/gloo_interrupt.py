"""What each of two processes does in `test_interrupted_process.py`: one of them is interrupted while it saves.

Usage: torchrun gloo_interrupt.py ROOT
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.checkpoint.faults import CountingFiles
from tests.checkpoint.gloo_save import save

from windlass.checkpoint.files import Files
from windlass.checkpoint.store import Store


def interrupted() -> None:
    raise KeyboardInterrupt


def leave() -> None:
    raise SystemExit(3)


def attempt(root: Path, step: int, files: Files) -> str | None:
    try:
        return save(root, step, files)
    except (KeyboardInterrupt, SystemExit) as error:
        return type(error).__name__


def main(root: Path) -> list[Any]:
    dist.init_process_group("gloo")  # its time-out is half an hour
    rank = dist.get_rank()
    results = [attempt(root, 1, Files())]
    for victim in (0, 1):
        for at, fault in ((2, interrupted), (6, leave), (9, interrupted)):
            faulty = CountingFiles(at, fault) if rank == victim else Files()
            results.append(attempt(root, 2, faulty))
            dist.barrier()  # an interrupted rank 0 has removed its staged checkpoint
    standing = [info.step for info in Store(root).list()]
    results.append(attempt(root, 3, Files()))
    dist.destroy_process_group()
    return [results, standing]
