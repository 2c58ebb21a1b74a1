"""Running statistics and other buffers, which each rank's forwards move on its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


def share_buffers(module: nn.Module) -> None:
    """Give every rank rank 0's buffers. Collective."""
    for buffer in module.buffers():
        torch.distributed.broadcast(buffer.detach(), 0)


@contextlib.contextmanager
def buffers_of_first_rank(module: nn.Module) -> Iterator[None]:
    """Within the body every rank holds rank 0's buffers: those that are saved.

    Each rank's own follow its own data until the next forward, so without this an evaluation would be of several
    models, most of them not the one in the checkpoint. Collective.
    """
    buffers = list(module.buffers())
    own = [buffer.detach().clone() for buffer in buffers]
    share_buffers(module)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, saved in zip(buffers, own, strict=True):
                buffer.copy_(saved)
