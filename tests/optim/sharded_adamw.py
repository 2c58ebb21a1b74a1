"""Two ranks, a sharded model: the parts of each rank equal those of torch's AdamW to the bit.

Some parameters stay whole, of which one has no elements. Torch needs them in a group of their own.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from windlass.dist.sharded import local
from windlass.optim.optimizers.adamw import AdamW


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.nothing = nn.Parameter(torch.ones(5)), nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.nothing.sum()


def trained(cls: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), Scaled(), nn.Linear(5, 1))
    fully_shard(model[0])
    kept_whole = set(model[1].parameters())
    fully_shard(model, ignored_params=kept_whole)
    sharded = [p for p in model.parameters() if p not in kept_whole]
    groups = [sharded, [*model[1].parameters()]] if cls is torch.optim.AdamW else [[*model.parameters()]]
    optimizer = cls([{"params": group} for group in groups], lr=0.01, fused=True)
    for step in range(4):
        if step == 1 and cls is AdamW:
            patch.setitem(
                inspect.unwrap(torch.optim.Adam.step).__globals__, "adam", None
            )  # no update of torch
        model(torch.full((3, 7), float(step + dist.get_rank()))).square().mean().backward()
        for parameter in kept_whole:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in sharded)
    return [local(p).detach() for p in model.parameters()]


dist.init_process_group("gloo")
theirs = trained(torch.optim.AdamW)
with pytest.MonkeyPatch.context() as patch:
    ours = trained(AdamW)
torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
dist.destroy_process_group()
