"""GaLore with AdamW whose moments are in 8 bits (arXiv:2403.03507; arXiv:2110.02861)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from windlass.dist.sharded import whole
from windlass.optim.optimizers.galore_adamw import GaLoreAdamW, adam_direction
from windlass.optim.optimizers.options import recipe_of

_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


class GaLoreAdamW8bit(GaLoreAdamW):
    """As `GaLoreAdamW`, with moments in blocks of 8-bit numbers; those of fewer than 4,096 numbers stay in fp32.

    The quantisation is plain PyTorch, so it runs on every device.
    """

    def has_whole_state(self, group: dict[str, Any]) -> bool:
        return True

    def displacement(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        grad = whole(grad)  # blocks of all of it
        # A dict of its own: the state itself must not keep the moments in fp32.
        moments: dict[str, Any] = {"step": state["step"]}
        for key, signed in _MOMENTS:
            if f"{key}_scale" in state:
                moments[key] = dequantise(state[key], state[f"{key}_scale"], signed).to(grad.dtype)
            elif key in state:
                moments[key] = state[key]
        direction = adam_direction(grad, moments, group)
        for key, signed in _MOMENTS:
            if grad.numel() < SMALLEST:
                state[key] = moments[key]
            else:
                state[key], state[f"{key}_scale"] = quantise(moments[key], signed)
        return direction.mul_(group["lr"])


galore_adamw_8bit = recipe_of(GaLoreAdamW8bit)
BLOCK = 256
SMALLEST = 4096  # tensors with fewer numbers stay in fp32: they cost little, and errors matter more


@functools.cache
def levels(signed: bool) -> Tensor:
    """The 256 levels in ascending order, fp32 on the CPU: in [-1, 1] if `signed`, else in [0, 1]. They become denser
    towards zero: seven decades, each with twice as many levels as the one below it.
    """
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
    # The last block is filled up with zeros, which do not change its largest magnitude.
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(1)
    # A block of zeros has the scale 0: without the lower bound it would become NaN.
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
