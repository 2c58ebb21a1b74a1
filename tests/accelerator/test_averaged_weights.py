"""Optimizers with averaged weights in a loop of the user's own: saved and loaded in both modes, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from windlass import Accelerator
from windlass.optim.optimizers.schedule_free import ScheduleFreeAdamW


def update(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_loop_continues_to_the_bit(mode: str, tmp_path: Path) -> None:
    ends = []
    for resumed in (False, True):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(4, 4)
        prepared = accelerator.prepare(model, ScheduleFreeAdamW(model.parameters(), lr=0.1))
        if resumed:
            accelerator.load_state(str(tmp_path / "state"))
        else:
            for _ in range(3):
                update(accelerator, *prepared)
            getattr(prepared[1], mode)()
            accelerator.save_state(str(tmp_path / "state"))
        prepared[1].train()
        update(accelerator, *prepared)
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)
