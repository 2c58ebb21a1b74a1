from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from windlass.forecast.child import Child
from windlass.forecast.size import held_by_updates


@pytest.mark.parametrize("forks", [True, False])
def test_what_updates_hold_is_that_of_all_layers(forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "can_fork", forks)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    held = held_by_updates(model, lambda: torch.optim.AdamW(model.parameters()), contextlib.nullcontext)
    parameters = 12 * (8 * 8 + 8)
    # Weights and the two averages are counted in fp32, and a step for each of the 24 tensors.
    assert held == 3 * 4 * parameters + 4 * 24
    assert len(model) == 12
