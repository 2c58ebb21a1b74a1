"""Averages of gradients over ranks, in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.dist.sharded import local


def average_gradients(
    parameters: Sequence[nn.Parameter], total: Callable[[Tensor], Tensor], count: int
) -> None:
    """Average the gradients of parameters, or of this rank's parts of them, over `count` ranks. One exchange for each
    dtype.

    Those that no rank has stay None. `total` sums a tensor over the ranks, in place.

    Raises:
        ModelError: some ranks have a gradient of a parameter, and others do not.
    """
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        members = [p for p in parameters if p.dtype == dtype]
        parts = [torch.zeros_like(local(p.detach())) if p.grad is None else local(p.grad) for p in members]
        present = torch.tensor([p.grad is not None for p in members], dtype=dtype, device=parts[0].device)
        flat = torch.cat([present, *(part.flatten() for part in parts)])
        total(flat)
        missing = torch.tensor([p.grad is None for p in members])
        if missing.any() and flat[: len(members)].cpu()[missing].any():
            raise ModelError(
                "the loss of some ranks depends on a parameter that that of others does not reach: use all trained "
                "parameters in the loss on every rank, or freeze it"
            )
        start = len(members)
        for parameter, part in zip(members, parts, strict=True):
            if parameter.grad is not None:
                part.copy_(flat[start : start + part.numel()].view_as(part) / count)
            start += part.numel()
