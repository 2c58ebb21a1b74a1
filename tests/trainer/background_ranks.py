"""Run by `torch.distributed.run`: ranks whose disks are slow or fail, one at a time, while they train on."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from tests.trainer.background_cases import SlowDisk, Weights, trainer_of

from windlass import Trainer, TrainerCallback
from windlass.checkpoint import host_memory
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError, PeerError
from windlass.trainer import run_saver, save_retry

RANK = int(os.environ["RANK"])
save_retry.FIRST_PAUSE = (
    1e6  # however slow the machine is, what failed is not saved between the saves that are due
)


def slow(folder: Path, **how: Any) -> dict[str, Any]:
    """The disk of rank 1 is slow: both learn of the save at the same update, and it holds what was to be saved."""
    weights = Weights()
    with SlowDisk(until=6, only_rank=1) as disk:
        trainer = trainer_of(folder, disk, weights, save_steps=3, max_steps=12, **how)
        trainer.train()
    torch.distributed.barrier()
    saved = torch.nn.Module()
    saved.layer = torch.nn.Linear(4, 3, dtype=torch.float64)
    same = []
    for step in (3, 6, 9, 12):
        CheckpointManager(Store(folder)).load(folder / f"checkpoint-{step}").load_weights(saved)
        whole = weights.after[step]
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        same.append(torch.equal(saved.layer.weight, whole))
    return {"notes": trainer.notes, "same": same}


def failing(folder: Path) -> dict[str, Any]:
    """The disk of rank 1 fails while step 4 is saved: that checkpoint is lost to both, and nothing else."""
    write = Files.write_some

    def fail(files: Files, descriptor: int, piece: memoryview) -> int:
        if RANK == 1 and threading.current_thread().name == "windlass-save-4":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(files, descriptor, piece)

    Files.write_some = fail  # type: ignore[method-assign]
    trainer = trainer_of(folder, max_steps=8)
    trainer.train()
    Files.write_some = write  # type: ignore[method-assign]
    torch.distributed.barrier()
    return {"notes": trainer.notes, "folders": sorted(p.name for p in folder.iterdir() if p.is_dir())}


class Odd(TrainerCallback):
    """Rank 0's state is nothing that can be written."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"odd": 0 if RANK else object()}}


def unsavable(folder: Path) -> str:
    """The rank that has it says what it is; the other is not left waiting."""
    try:
        trainer_of(folder, Odd(), max_steps=2).train()
    except CheckpointError as error:
        return str(error)
    return "saved"


class FailsInEvaluation(Trainer):
    """Rank 1 cannot make its second prediction."""

    made = 0

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.made += 1
        if RANK == 1 and self.made == 2:
            raise ValueError("a prediction's own mistake")
        return super().prediction_step(*args, **kwargs)


class TornData(list[Any]):
    """Rank 1 cannot read its second sample."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        if RANK == 1 and self.read == 2:
            raise ValueError("a sample's own mistake")
        return super().__getitem__(index)


def failing_evaluation(folder: Path, kind: type[Trainer] = Trainer, torn: bool = False) -> str:
    """The others are between batches, where ranks hear of each other: they learn of it all the same."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    trainer = trainer_of(folder, kind=kind, **often)
    if torn:
        trainer.eval_dataset = TornData(trainer.eval_dataset)
    try:
        trainer.train()
    except (PeerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "evaluated"


class Waiting(TrainerCallback):
    """Predicts until the thread of a save of rank 0 has ended."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for thread in threading.enumerate():
            if thread.name == "windlass-save-2":
                thread.join(60)


def refused_in_evaluation(folder: Path) -> str:
    """What rank 0 may not write is found out while all evaluate: the others hear of it there."""
    write = Files.write_some

    def refuse(files: Files, descriptor: int, piece: memoryview) -> int:
        if RANK == 0 and threading.current_thread().name == "windlass-save-2":
            raise ValueError("not for this rank")
        return write(files, descriptor, piece)

    Files.write_some = refuse  # type: ignore[method-assign]
    often = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}
    small = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 1, "max_steps": -1}
    trainer = trainer_of(folder, Waiting(), **often, **small)
    trainer.eval_dataset = list(trainer.eval_dataset) * 4
    try:
        trainer.train()
    except (PeerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Files.write_some = write  # type: ignore[method-assign]
    return "saved"


def shared_memory(folder: Path) -> list[int]:
    """The processes of a machine take their copies out of the same memory: each has room for its own alone."""
    whole = host_memory.available_memory
    needed: list[int] = []
    trainer = trainer_of(folder, max_steps=4, fsdp="full_shard")
    fits = run_saver.RunSaver._fits

    def noting(saver: Any, more: int) -> bool:
        needed.append(more)
        host_memory.available_memory = lambda: int(more * 1.9)
        needed.append(int(fits(saver, more)))
        host_memory.available_memory = lambda: int(more * 2.9)
        return fits(saver, more)

    run_saver.RunSaver._fits = noting  # type: ignore[method-assign]
    trainer.train()
    host_memory.available_memory, run_saver.RunSaver._fits = whole, fits  # type: ignore[method-assign]
    return [*needed[1::2], *(learned - step for step, learned, _ in trainer.notes[:1])]


def main() -> None:
    folder = Path(sys.argv[1])
    said = {
        "slow": slow(folder / "slow"),
        "sharded": slow(folder / "sharded", fsdp="full_shard"),
        "failing": failing(folder / "failing"),
        "unsavable": unsavable(folder / "unsavable"),
        "prediction": failing_evaluation(folder / "prediction", FailsInEvaluation),
        "sample": failing_evaluation(folder / "sample", torn=True),
        "refused": refused_in_evaluation(folder / "refused"),
        "memory": shared_memory(folder / "memory"),
    }
    (folder / f"rank{RANK}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
