"""Layers that a script's callback unfreezes during a run, and gives to the optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch
from tests.trainer import unfrozen_runs
from tests.trainer.unfrozen_runs import TwoLayers, samples, train
from torch import nn

SCRIPT = Path(unfrozen_runs.__file__)


def expected() -> list[torch.Tensor]:
    """The weights after the same updates in a plain loop."""
    model, data = TwoLayers(), samples()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.5)
    for step in range(6):
        if step == 2:
            model.first.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.2})
        batch = data[4 * step : 4 * step + 4]
        x, labels = torch.stack([row["x"] for row in batch]), torch.tensor([row["labels"] for row in batch])
        model(x, labels)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().flatten() for p in model.parameters()]


@pytest.mark.parametrize("optim", ["sgd", "lomo"])
def test_its_gradients_are_clipped_and_cleared_with_the_others(optim: str, tmp_path: Path) -> None:
    for mine, wanted in zip(train(tmp_path, optim=optim), expected(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


@pytest.mark.dist
def test_shards_train_it_and_replicas_refuse_it(tmp_path: Path) -> None:
    launch(2, SCRIPT, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for mine, wanted in zip(found["shards"], expected(), strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), wanted, rtol=0, atol=1e-12)
        for kind in ("replicas", "in the backward"):
            assert "parameters that were frozen when the run began require gradients now" in found[kind]
