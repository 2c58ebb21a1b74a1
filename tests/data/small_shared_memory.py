"""Reads data with workers where /dev/shm has 64 KiB; ends with 77 where it may not be made so small."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from windlass import Accelerator, Trainer, TrainingArguments
from windlass.core.errors import WorkerError

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS


def shrink() -> bool:
    """Give this process and its children a /dev/shm of their own."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        return False
    private = ["mount", "--make-rprivate", "/"]
    small = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]
    return all(subprocess.run(words, capture_output=True).returncode == 0 for words in (private, small))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20_000, 2)

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


def trainer(folder: Path, workers: int) -> Trainer:
    args = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, dataloader_num_workers=workers, use_cpu=True
    )
    rows = [{"x": torch.randn(20_000), "labels": n % 2} for n in range(16)]
    return Trainer(Wide(), args, train_dataset=rows, eval_dataset=rows)


def loop() -> None:
    accelerator = Accelerator(cpu=True)
    data: Any = [torch.randn(20_000) for _ in range(8)]
    for _ in accelerator.prepare(DataLoader(data, batch_size=4, num_workers=1, collate_fn=torch.stack)):
        pass


def collated() -> None:
    data: Any = [torch.randn(20_000) for _ in range(8)]
    for _ in Accelerator(cpu=True).prepare(DataLoader(data, batch_size=4, num_workers=1)):
        pass


def without_room() -> None:
    """Not even the locks of the workers' queues fit."""
    with open("/dev/shm/full", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    loop()


def report(kind: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except WorkerError as error:
        has_fix = "--shm-size" in str(error) and "/dev/shm has 0.1 MiB" in str(error)
        print(f"{kind}: WorkerError {'with its fix' if has_fix else error}", flush=True)
    else:
        print(f"{kind}: no error", flush=True)


if __name__ == "__main__":
    if not shrink():
        sys.exit(77)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        report("train", trainer(Path(folder), 2).train)
        report("evaluate", trainer(Path(folder), 2).evaluate)
        report("loop", loop)
        report("collated", collated)
        report("without room", without_room)
        os.remove("/dev/shm/full")
        trainer(Path(folder), 0).train()
    os._exit(0)
