"""Ranks that use different parameters: DeepSpeed would sum the gradients of one with those of another."""

from __future__ import annotations

import os

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.zero.needed import needs_deepspeed
from torch import nn

from windlass import Accelerator
from windlass.core.errors import ModelError
from windlass.utils import DeepSpeedPlugin

RANK = int(os.environ.get("RANK", "0"))

pytestmark = [pytest.mark.dist, needs_deepspeed]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_that_use_different_parameters_are_told(stage: int, clips: bool) -> None:
    """Also if what they use has the same sizes."""
    for said in on_ranks(2, differing, stage, clips):
        assert "ranks have used different parameters of the model in this update" in said


def test_gradients_that_are_discarded_may_differ() -> None:
    assert on_ranks(2, discarding) == ["", ""]


def test_layers_of_experts_may_be_used_differently() -> None:
    """Stage 3 gathers and reduces such a layer at once (`leaf_module`)."""
    assert on_ranks(2, differing, 3, False, "Sides") == ["", ""]


class Sides(nn.ModuleList):
    def forward(self, x: torch.Tensor, side: int) -> torch.Tensor:
        return self[side](x)  # type: ignore[no-any-return]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.sides = nn.Linear(3, 3), Sides(nn.Linear(3, 3) for _ in range(2))

    def forward(self, side: int) -> torch.Tensor:
        result: torch.Tensor = self.sides(self.first(torch.ones(2, 3)), side).square().mean()
        return result


def prepared(stage: int, leaf: str | None = None) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    plugin = DeepSpeedPlugin(zero_stage=stage, transformer_moe_cls_names=leaf)
    accelerator, model = Accelerator(cpu=True, deepspeed_plugin=plugin), Branches()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def differing(stage: int, clips: bool, leaf: str | None = None) -> str:
    accelerator, model, optimizer = prepared(stage, leaf)
    accelerator.backward(model(RANK))
    try:
        accelerator.clip_grad_norm_(model.parameters(), 1.0) if clips else optimizer.step()
    except ModelError as error:
        return str(error)
    finally:
        accelerator.free_memory()
    return ""


def discarding() -> str:
    accelerator, model, optimizer = prepared(1)
    for side in (RANK, 0):
        optimizer.zero_grad()
        accelerator.backward(model(side))
    optimizer.step()
    accelerator.free_memory()
    return ""
