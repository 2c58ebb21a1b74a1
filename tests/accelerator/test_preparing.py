"""What `prepare` makes of a model, and what it says."""

from __future__ import annotations

import torch
from tests.said import listening
from torch import nn

from windlass import Accelerator


def test_a_model_in_mixed_precision_is_exported() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(3, 2))
    x = torch.ones(1, 3)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_momentum_that_no_checkpoint_holds_is_said_when_it_is_prepared() -> None:
    model = nn.EmbeddingBag(3, 2, sparse=True)
    with listening() as said:
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    (found,) = [line for line in said if line.startswith("save_state will fail: ")]
    assert found.endswith("sparse=False, or set momentum to 0")
