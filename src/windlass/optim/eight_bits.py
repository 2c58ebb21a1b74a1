"""Averages in 8 bits (Dettmers et al., arXiv:2110.02861): blocks of numbers, each relative to its largest one.

A number is one of 256 levels that become denser towards zero: seven decades, each with twice as many levels as the one
below it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK = 256
SMALLEST = 4096  # tensors with fewer numbers stay in fp32: they cost little, and errors matter more


@functools.cache
def levels(signed: bool) -> Tensor:
    """The 256 levels in ascending order, fp32 on the CPU: in [-1, 1] if `signed`, else in [0, 1]."""
    found = [0.0, 1.0]
    for decade in range(7):
        steps = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, steps + 1, dtype=torch.float64)
        middles = (10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2).tolist()
        found += middles
        if signed:
            found += [-value for value in middles]
    return torch.tensor(sorted(found), dtype=torch.float32)


def quantise(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """The nearest levels, uint8 of the shape of `values`, and the largest magnitude of each block, fp32.

    Without signs, only 0 becomes 0: an update is divided by the root of a second moment, and would be as large as
    the first moment over `eps` where that is still there.
    """
    flat = values.detach().float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(1)
    relative = padded / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    table = levels(signed).to(values.device)
    nearest = torch.bucketize(relative, (table[1:] + table[:-1]) / 2)
    if not signed:
        nearest = torch.where(padded > 0, nearest.clamp(min=1), nearest)
    return nearest.to(torch.uint8).flatten()[: flat.numel()].view(values.shape), scale


def dequantise(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """The numbers of `quantise`, fp32."""
    values = levels(signed).to(codes.device)[codes.flatten().long()]
    return (values * scale.repeat_interleave(BLOCK)[: values.numel()]).view(codes.shape)
