"""The optimizer that `prepare` returns (in loops: `test_own_loop.py`, `test_copies.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass import Accelerator, GradScalerKwargs
from windlass.core.errors import ModelError


def test_a_wrapped_optimizer_is_stepped_through_its_wrapper_until_it_is_free() -> None:
    accelerator, layer = Accelerator(cpu=True), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer, prepared = accelerator.prepare(layer, optimizer)
    accelerator.backward(layer(torch.ones(1, 2)).sum())
    assert prepared.step(lambda: 3.0) == 3.0, "the result of the closure"
    with pytest.raises(ModelError, match="stepped directly"):
        optimizer.step()
    accelerator.gradient_state.begin(object())  # a pass that was left
    accelerator.free_memory()
    assert not accelerator.gradient_state.in_dataloader
    optimizer.step()


def test_gradients_are_clipped_without_the_loss_scale_and_on_both_sides() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
    )
    layer: Any = nn.Linear(2, 1, bias=False)
    layer, _ = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    accelerator.backward(layer(torch.tensor([[3.0, -4.0]])).sum())
    accelerator.clip_grad_value_(layer.parameters(), 3.5)
    assert layer.weight.grad.tolist() == [[3.0, -3.5]]
    assert accelerator.clip_grad_norm_(layer.parameters(), 100.0).item() == pytest.approx(21.25**0.5)


def test_states_whose_parameters_an_engine_took_are_not_numbered() -> None:
    """DeepSpeed's third stage empties the groups: torch's own `state_dict` ends in a KeyError then."""
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    prepared = Accelerator(cpu=True).prepare(optimizer)
    assert prepared.state_dict()["state"].keys() == {0, 1}
    optimizer.param_groups[0]["params"].clear()
    with pytest.raises(ModelError, match=r"save and load it with `accelerator\.save_state`"):
        prepared.state_dict()
