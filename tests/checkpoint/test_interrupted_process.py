"""An interrupt of one rank in a save, among real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.checkpoint.faults import CountingFiles
from tests.checkpoint.gloo_save import save
from tests.dist.launch import on_ranks

from windlass.checkpoint.files import Files
from windlass.checkpoint.store import Store


@pytest.mark.dist
def test_a_rank_that_is_interrupted_in_a_save_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The group's own time-out is far beyond this test's: waiting for it fails."""
    results = on_ranks(2, main, tmp_path)
    ways = ["KeyboardInterrupt", "SystemExit", "KeyboardInterrupt"]
    assert results[0] == [["checkpoint-1", *ways, None, None, None, "checkpoint-3"], [1]]
    assert results[1] == [["checkpoint-1", None, None, None, *ways, "checkpoint-3"], [1]]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-3"]


# --- what each rank runs ----------------------------------------------------------------------------------------------


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
