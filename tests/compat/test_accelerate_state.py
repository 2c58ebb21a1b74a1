"""The folders of accelerate's `save_state` are refused by name, with a fix that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.accelerator.loop_cases import make
from torch import nn

import windlass
from windlass.compat.readers.accelerate_state import explain
from windlass.core.errors import CheckpointError

accelerate = pytest.importorskip("accelerate")


def theirs(folder: Path, safe: bool) -> nn.Module:
    accelerator, model = accelerate.Accelerator(cpu=True), nn.Linear(3, 2)
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(folder, safe_serialization=safe)
    assert prepared is not None
    return model


@pytest.fixture(autouse=True)
def _own_state() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("safe", [True, False])
def test_load_state_names_accelerate_and_the_fix(tmp_path: Path, safe: bool) -> None:
    model = theirs(tmp_path / "state", safe)
    accelerator, ours = make(False), nn.Linear(3, 2)
    accelerator.prepare(ours)
    with pytest.raises(CheckpointError, match="was written by accelerate's save_state") as error:
        accelerator.load_state(tmp_path / "state")
    fix = re.search(r"before prepare\(\) with (.*), and start", str(error.value))
    assert fix is not None
    fresh = nn.Linear(3, 2)
    if safe:
        assert fix[1] == f"windlass.load_checkpoint_in_model(model, {str(tmp_path / 'state')!r})"
        windlass.load_checkpoint_in_model(fresh, str(tmp_path / "state"))
    else:
        assert "weights_only=True" in fix[1]
        fresh.load_state_dict(torch.load(tmp_path / "state" / "pytorch_model.bin", weights_only=True))
    for got, wanted in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_other_folders_are_not_its(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert explain(tmp_path) is None
    accelerator = make(False)
    accelerator.prepare(nn.Linear(3, 2))
    assert explain(Path(accelerator.save_state(tmp_path / "ours"))) is None
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        accelerator.load_state(tmp_path)
