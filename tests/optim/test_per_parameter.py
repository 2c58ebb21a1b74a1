"""What optimizers have in common: copies and state dicts, which PyTorch makes by rules of its own, and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ModelError
from windlass.optim.groups import arranged, parameter_groups
from windlass.optim.registry import make_optimizer, optimizer_factory

NAMES = {
    "adafactor": {}, "adalomo": {}, "lomo": {}, "muon": {}, "lion_32bit": {}, "ademamix": {}, "stable_adamw": {},
    "grokadamw": {}, "schedule_free_adamw": {}, "adamw_torch_fused": {},
    "adamw_anyprecision": {"bf16_stochastic_round": True}, "galore_adamw_layerwise": {},
}  # fmt: skip


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()
    return model


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_continues_as_the_original(name: str, copied: Callable[[Any], Any]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).bfloat16()
    cls, kwargs = optimizer_factory(plan := OptimizerPlan(name, options=NAMES[name]))
    optimizer = make_optimizer(arranged(model, cls, parameter_groups(model, plan)), cls, kwargs)
    updated(model, optimizer, 1)
    twin, of_twin = copied((model, optimizer))
    for attribute in ("in_backward", "keeps_small_updates"):
        assert getattr(of_twin, attribute, None) == getattr(optimizer, attribute, None)
    for one, other in zip(
        updated(model, optimizer, 2).parameters(), updated(twin, of_twin, 2).parameters(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_continues_to_the_bit_with_weights_in_bf16(name: str) -> None:
    """PyTorch casts state to the dtype of its parameter, and some of these keep theirs in fp32."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).bfloat16()
    cls, kwargs = optimizer_factory(plan := OptimizerPlan(name, options=NAMES[name]))

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(arranged(module, cls, parameter_groups(module, plan)), cls, kwargs)

    updated(model, optimizer := optimizer_of(model), 1)
    twin = copy.deepcopy(model)
    of_twin = optimizer_of(twin)
    of_twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    dtypes = [
        {n: v.dtype for n, v in state.items() if isinstance(v, torch.Tensor)}
        for state in optimizer.state.values()
    ]
    assert dtypes == [
        {n: v.dtype for n, v in state.items() if isinstance(v, torch.Tensor)}
        for state in of_twin.state.values()
    ]
    updated(model, optimizer, 2)
    updated(twin, of_twin, 2)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize(
    "name", ["adafactor", "adalomo", "galore_adamw", "apollo_adamw", "adamw_8bit", "adamw_torch_8bit"]
)
def test_complex_parameters_are_refused_by_optimizers_of_real_numbers(name: str) -> None:
    for library in {"adamw_8bit": ["bitsandbytes"], "adamw_torch_8bit": ["torchao"]}.get(name, []):
        pytest.importorskip(library)
    cls, kwargs = optimizer_factory(OptimizerPlan(name))
    wave = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ModelError, match="cannot update complex parameters; use optim='adamw_torch'"):
        make_optimizer([wave], cls, kwargs)
