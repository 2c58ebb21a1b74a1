"""Optimizers over tensors of no prepared model, in a loop of one process: trained, saved and restored to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.loop_cases import make, tiny
from tests.optim.helpers import heard
from torch import Tensor, nn

from windlass.core.errors import CheckpointError


class Loop:
    """A prepared model or none, and an optimizer over other tensors, alone or together with the model's."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.accelerator = make(False)
        self.model: Any = tiny()
        self.second = nn.Linear(1, 1).double()
        self.latents = torch.randn(3, 6, dtype=torch.float64).requires_grad_()
        loose: list[Tensor] = [self.latents, *self.second.parameters()]
        adamw = torch.optim.AdamW
        if kind == "alone":
            self.model.requires_grad_(False)
            self.optimizers = [self.accelerator.prepare(adamw(loose, lr=0.1))]
        elif kind == "together":
            groups = [{"params": [*self.model.parameters()]}, {"params": loose, "lr": 0.2}]
            self.model, *self.optimizers = self.accelerator.prepare(self.model, adamw(groups, lr=0.1))
        else:
            own, other = adamw(self.model.parameters(), lr=0.1), torch.optim.SGD(loose, lr=0.1, momentum=0.9)
            self.model, *self.optimizers = self.accelerator.prepare(self.model, own, other)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.accelerator.backward(
                self.second(self.model(self.latents)).square().sum() + self.latents.sum()
            )
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        held = [*self.model.parameters(), self.latents, *self.second.parameters()]
        return [tensor.detach().clone() for tensor in held]


KINDS = ["alone", "beside", "together"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_goes_on_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole, other = Loop(kind), Loop(kind, seed=0 if kind == "alone" else 1)
    begin = whole.values()
    with torch.no_grad():
        other.latents.zero_()
    whole.run(2)
    whole.accelerator.save_state(tmp_path / "state")
    whole.run(2)
    other.accelerator.load_state(tmp_path / "state")
    other.run(2)
    assert all(map(torch.equal, whole.values(), other.values()))
    moved = [not torch.equal(*pair) for pair in zip(begin, whole.values(), strict=True)]
    assert all(moved[4:])
    assert all(moved[:4]) == (kind != "alone")


def test_what_is_saved_of_them_is_said_once() -> None:
    accelerator, model, latents = make(False), tiny(), torch.zeros(6, dtype=torch.float64, requires_grad=True)
    model, optimizer = accelerator.prepare(model, torch.optim.Adagrad([latents], lr=0.1))
    with heard() as records:
        for _ in range(2):
            accelerator.backward(model(latents).sum())
            optimizer.step()
    (said,) = [record.getMessage() for record in records]
    assert said.startswith("The Adagrad updates 1 tensor(s) that are no parameter of a prepared model")


def test_other_tensors_than_were_saved_are_refused(tmp_path: Path) -> None:
    loop = Loop("beside")
    loop.run(1)
    loop.accelerator.save_state(tmp_path / "state")
    fewer = make(False)
    model = tiny()
    fewer.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        torch.optim.SGD([torch.ones(2).requires_grad_()], lr=0.1),
    )
    with pytest.raises(CheckpointError, match="3 tensors of no prepared model and 1 here"):
        fewer.load_state(tmp_path / "state")
    other = Loop("beside")
    other.optimizers[1].param_groups[0]["params"][0] = torch.ones(5).requires_grad_()
    with pytest.raises(CheckpointError):
        other.accelerator.load_state(tmp_path / "state")
