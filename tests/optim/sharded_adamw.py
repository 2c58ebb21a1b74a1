"""Two ranks, a sharded model: the parts of each rank equal those of torch's AdamW to the bit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from windlass.optim.optimizers.adamw import AdamW


def trained(cls: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = cls(model.parameters(), lr=0.01, fused=True)
    for step in range(4):
        if step == 1 and cls is AdamW:
            patch.setitem(
                inspect.unwrap(torch.optim.Adam.step).__globals__, "adam", None
            )  # no update of torch
        model(torch.full((3, 7), float(step + dist.get_rank()))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
    return [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]


dist.init_process_group("gloo")
theirs = trained(torch.optim.AdamW)
with pytest.MonkeyPatch.context() as patch:
    ours = trained(AdamW)
torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
dist.destroy_process_group()
