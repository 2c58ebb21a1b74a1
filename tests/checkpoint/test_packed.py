"""Tensors that are made of other tensors, in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from windlass.checkpoint.codec import load_state, save_state
from windlass.checkpoint.optimizer_state import load_optimizer_state, save_optimizer_state
from windlass.checkpoint.packed import is_packed_map, join_packed, split_packed
from windlass.core.errors import CheckpointError
from windlass.core.trees import map_leaves
from windlass.dist.sharded import is_packed

BITS = [8, 4]


def packed(bits: int) -> Any:
    library = pytest.importorskip("torchao.optim")
    return getattr(library, f"AdamW{bits}bit")


@pytest.fixture(autouse=True)
def uncompiled() -> Any:
    with torch.compiler.set_stance("force_eager"):
        yield


def trained(bits: int, steps: int = 3) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = packed(bits)(model.parameters(), lr=1e-2)
    for _ in range(steps):
        update(model, optimizer)
    return model, optimizer


def update(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("bits", BITS)
def test_a_librarys_own_optimizer_continues_to_the_bit(bits: int, tmp_path: Path) -> None:
    model, optimizer = trained(bits)
    save_state(tmp_path / "state", save_optimizer_state(optimizer, model))
    other = nn.Linear(64, 64)
    other.load_state_dict(model.state_dict())
    fresh = packed(bits)(other.parameters(), lr=1e-2)
    load_optimizer_state(fresh, other, load_state(tmp_path / "state"))
    assert is_packed(fresh.state[other.weight]["exp_avg"])
    for pair in ((model, optimizer), (other, fresh)):
        update(*pair)
    assert torch.equal(model.weight, other.weight)


def test_plain_tensors_are_not_packed() -> None:
    assert not any(is_packed(value) for value in (torch.ones(2), nn.Parameter(torch.ones(2)), 3, None))
    entry = {"step": 1, "exp_avg": torch.ones(2)}
    assert map_leaves(split_packed, entry, is_packed)["exp_avg"] is entry["exp_avg"]


def test_a_class_that_is_not_loaded_is_refused() -> None:
    for name in ("os.system", "nowhere.Tensor", "torch.Tensor", "builtins.dict"):
        saved = {"windlass.packed": name, "tensors": {}, "rest": []}
        assert is_packed_map(saved)
        with pytest.raises(CheckpointError, match="is not loaded"):
            join_packed(saved, torch.ones(2), torch.clone)


@pytest.mark.parametrize("damage", [{"tensors": {}}, {"rest": []}, {"tensors": {"codes": torch.ones(3)}}])
def test_what_cannot_be_put_together_is_refused(damage: dict[str, Any]) -> None:
    model, optimizer = trained(8, 1)
    saved = split_packed(optimizer.state[model.weight]["exp_avg"])
    with pytest.raises(CheckpointError, match="cannot be put together"):
        join_packed({**saved, **damage}, model.weight, torch.clone)
    with pytest.raises(CheckpointError, match="has shape"):
        join_packed(saved, torch.ones(3), torch.clone)
