"""Run on ranks: the disk of rank 1 refuses some saves, on each operation another time."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.trainer.background_cases import trainer_of

from windlass import TrainerCallback
from windlass.checkpoint.files import Files
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError
from windlass.trainer import run_checkpoints

RANK = int(os.environ.get("RANK", "0"))


def run(folder: Path, refused: Callable[[int], bool], number: int, **how: Any) -> dict[str, Any]:
    """A run in which rank 1 cannot write the steps for which `refused` says so."""
    before = Files.before

    def refuse(files: Files, operation: str, path: Path) -> None:
        stem = path.parent.name.rpartition("-")[2]
        if RANK == 1 and path.parent.name.startswith("tmp-checkpoint-") and refused(int(stem)):
            raise OSError(number, os.strerror(number), str(path))
        before(files, operation, path)

    Files.before = refuse  # type: ignore[method-assign]
    error = None
    try:
        trainer_of(folder, **how).train()
    except CheckpointError as raised:
        error = str(raised).split(":")[0]
    Files.before = before  # type: ignore[method-assign]
    torch.distributed.barrier()
    return {"error": error, "steps": [info.step for info in Store(folder).list()]}


class FolderAway(TrainerCallback):
    """On rank 0 a file is in place of the output folder, from update 3 to update 5."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir)
        if RANK == 0 and state.global_step == 3:
            shutil.rmtree(folder)
            folder.touch()
        if RANK == 0 and state.global_step == 5:
            folder.unlink()


def gathered(folder: Path) -> list[int]:
    """The steps that are saved by ranks that gather their shards on the first one, whose folder is away for a while."""
    parts = {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
    changes = {"save_steps": 2, "max_steps": 6, "save_in_background": False, "ddp_timeout": 30}
    trainer_of(folder, FolderAway(), **parts, **changes).train()
    torch.distributed.barrier()
    return [info.step for info in Store(folder).list()]


def main(root: Path) -> list[Any]:
    run_checkpoints.FIRST_PAUSE = 0.0
    run_checkpoints.time.sleep = lambda seconds: None  # between attempts at a last save
    told = [
        run(
            root / "passing",
            lambda step: step in (4, 8),
            errno.ESTALE,
            save_steps=4,
            max_steps=12,
            save_in_background=False,
        ),
        run(root / "last", lambda step: step == 8, errno.ETIMEDOUT, save_steps=4, max_steps=8),
        run(root / "limit", lambda step: True, errno.EMFILE, save_steps=2, max_steps=40, max_save_failures=3),
    ]
    told.append(gathered(root / "gathered"))
    torch.distributed.destroy_process_group()
    return told
