"""One rank of a loop whose model has running statistics of each rank's own, which is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass import Accelerator
from windlass.utils import DistributedDataParallelKwargs


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def main(folder: Path) -> None:
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    prepared = accelerator.prepare(model())
    prepared(torch.randn(8, 4) + accelerator.process_index)
    accelerator.save_state(folder)
