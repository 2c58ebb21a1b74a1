"""Where a process is among the others by its local rank, and a body that the first process runs before the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Let the process of local rank 0 run the body first, then the others; -1 is a process by itself.

    `TrainingArguments.main_process_first` does the same and cannot leave the others waiting if the first one fails.
    """
    if local_rank > 0:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def is_main_process(local_rank: int) -> bool:
    """Whether this local rank is that of the first process; -1 is a process by itself."""
    return local_rank in (-1, 0)


def total_processes_number(local_rank: int) -> int:
    """How many processes the job has; 1 if `local_rank` is -1, a process by itself."""
    return 1 if local_rank == -1 else dist.get_world_size()
