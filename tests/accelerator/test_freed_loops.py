"""What a loop of a script's own drops is freed at once, without a search for cycles."""

from __future__ import annotations

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from windlass import Accelerator

pytestmark = pytest.mark.usefixtures("no_collection")


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16": {"mixed_precision": "bf16"},
    "accumulates": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_all_is_freed_with_the_accelerator(options: str, tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True, **OPTIONS[options]), nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader: Any = DataLoader([torch.ones(3)] * 8, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(tmp_path / "state")
    found: list[weakref.ref[Any]] = [weakref.ref(one) for one in (accelerator, model, optimizer, loader)]
    found += [weakref.ref(optimizer.optimizer), *map(weakref.ref, model.parameters())]
    states = optimizer.state.values()
    found += [weakref.ref(value) for state in states for value in state.values() if isinstance(value, Tensor)]
    assert len(found) > 8
    del accelerator, model, optimizer, loader, schedule, states
    assert [type(one).__name__ for reference in found if (one := reference()) is not None] == []


class Renamed(nn.Linear):
    """A model that customizes its state, which is tried once before it is saved."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


@pytest.mark.parametrize("kind", [nn.Linear, Renamed])
def test_a_saved_model_is_freed_with_what_was_prepared(kind: type[nn.Linear], tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), kind(3, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(tmp_path / "state")
    found = weakref.ref(model)
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert found() is None


def test_an_optimizer_steps_after_its_accelerator_was_dropped() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.prepare(model)
    del accelerator
    before = model.bias.detach().clone()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert float((before - model.bias).detach()) == 1.0


def test_copies_of_a_model_in_mixed_precision() -> None:
    model: Any = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(2, 2))
    copied, sent = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model.bias.fill_(100.0)
    ones = torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.linear(ones, copied.weight, copied.bias).float()
    assert torch.equal(copied(ones), expected)
    # One that was sent to another process has no accelerator.
    assert torch.equal(sent(ones), nn.functional.linear(ones, sent.weight, sent.bias))
    reference = weakref.ref(copied)
    del copied
    assert reference() is None
