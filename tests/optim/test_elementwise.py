"""The base of elementwise optimizers: what it refuses, and closures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.core.errors import ModelError
from windlass.optim.optimizers.lion import Lion
from windlass.optim.optimizers.stable_adamw import StableAdamW


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match="Lion cannot use sparse gradients"):
        Lion(table.parameters()).step()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lr": -1.0}, "lr=-1.0"), ({"betas": (0.9, 1.0)}, "below 1"), ({"eps": float("nan")}, "eps=nan")],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StableAdamW([nn.Parameter(torch.ones(1))], **options)


def test_a_closure_computes_the_loss_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = Lion([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert weight.item() == pytest.approx(0.9)
