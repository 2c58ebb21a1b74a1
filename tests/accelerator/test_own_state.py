"""Loops of the user's own, with models that save in a way of their own or have state beside tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.loop_cases import make
from tests.trainer.odd_tensors import Odd
from tests.trainer.own_state_cases import CASES, Partial, own_tensors
from tests.trainer.small import rows
from torch import nn

from windlass.core.errors import CheckpointError
from windlass.core.tensors import same_bits


class Loop:
    def __init__(self, model: nn.Module) -> None:
        self.accelerator, self.bare = make(False), model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def run(self, steps: range) -> None:
        for step in steps:
            batch = rows(4, seed=step)
            x, labels = (
                torch.stack([row["x"] for row in batch]),
                torch.tensor([row["labels"] for row in batch]),
            )
            self.accelerator.backward(self.model(x, labels)["loss"])
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("case", [*CASES, "odd"])
def test_a_loop_that_goes_on_ends_with_the_same_bits(case: str, tmp_path: Path) -> None:
    build: Any = {**CASES, "odd": lambda: Odd(persistent=False, sparse=True)}[case]
    clean = Loop(build())
    clean.run(range(2))
    clean.accelerator.save_state(tmp_path / "state")
    clean.run(range(2, 4))
    other = Loop(build())
    other.accelerator.load_state(tmp_path / "state")
    other.run(range(2, 4))
    ours, theirs = own_tensors(clean.bare), own_tensors(other.bare)
    assert [name for name in ours if not same_bits(ours[name], theirs[name])] == []


def test_a_registered_optimizer_keeps_the_groups_that_others_hold(tmp_path: Path) -> None:
    accelerator, model = make(False), nn.Linear(2, 2)
    accelerator.prepare(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.register_for_checkpointing(inner)
    groups, (group,) = inner.param_groups, inner.param_groups
    folder = accelerator.save_state(tmp_path / "state")
    group["lr"] = 0.5
    accelerator.load_state(folder)
    assert inner.param_groups is groups
    assert groups[0] is group
    assert group["lr"] == 0.1


def test_a_model_that_does_not_come_back_is_refused_at_the_first_save(tmp_path: Path) -> None:
    loop = Loop(Partial())
    with pytest.raises(CheckpointError, match=r"that are trained: layer\.bias"):
        loop.accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()
