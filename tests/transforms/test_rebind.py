"""Optimizers that follow their parameters (on sharded models: `fsdp_ranks.py`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from windlass.core.errors import ModelError
from windlass.transforms.rebind import names_of, rebind


def replaced(module: nn.Module) -> None:
    """What sharding does to a module: other parameters under the same names."""
    for member in module.modules():
        for name, parameter in list(member.named_parameters(recurse=False)):
            setattr(member, name, nn.Parameter(parameter.detach().clone()))


def test_groups_and_state_follow_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}])
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before, groups = names_of(module), list(optimizer.param_groups)
    lists = [group["params"] for group in groups]
    moments = optimizer.state[parameters[0]]["exp_avg"]
    replaced(module)
    rebind(optimizer, before, module)
    assert all(group is kept for group, kept in zip(optimizer.param_groups, groups, strict=True))
    assert [id(p) for group in lists for p in group] == [id(p) for p in module.parameters()]
    assert groups[0]["lr"] == 0.5
    assert optimizer.state.keys() == set(module.parameters())
    assert optimizer.state[module[0].weight]["exp_avg"] is moments
    rebind(optimizer, before, module)
    assert len(optimizer.state) == 4


def test_a_parameter_of_another_model_is_refused_before_anything_changes() -> None:
    module, stray = nn.Linear(2, 3), nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([*module.parameters(), stray], lr=0.1)
    before, held = names_of(module), list(optimizer.param_groups[0]["params"])
    replaced(module)
    with pytest.raises(ModelError, match=r"parameter 2 of group 0 \(shape \[7\]\)"):
        rebind(optimizer, before, module)
    assert all(now is then for now, then in zip(optimizer.param_groups[0]["params"], held, strict=True))
