"""Run in a process of its own, whose address space the system limits: a batch that really does not fit."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.memory_cases import Samples, trainer_for
from torch import Tensor, nn

MIB = 1 << 20
WIDTH = 2 * MIB  # numbers of a row's activations: 16 MiB each time


class Wide(nn.Module):
    """Keeps some four activations of each row for its backward: 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x: Tensor, index: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x)
        wide = out.expand(-1, WIDTH).sin().cos().sin()
        return (wide.mean(1) - labels).square().mean(), out


_ARENA_MAX = -8  # M_ARENA_MAX of the C library


def main() -> None:
    # Each thread would reserve addresses of its own, which count against the limit.
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
    trainer = trainer_for(
        Path(sys.argv[1]), Wide(), Samples(), max_steps=2, save_strategy="no", log_level="warning"
    )
    # What needs room of its own: the threads of backward, and the compiler, which the first optimizer imports.
    torch.ones(4, requires_grad=True).sin().sum().backward()
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    room: Any = used + 12 * 4 * 16 * MIB * 3 // 4
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    trainer.train()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("found", trainer.state.train_batch_size)


if __name__ == "__main__":
    main()
