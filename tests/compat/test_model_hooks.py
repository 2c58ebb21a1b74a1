"""Hooks around a forward, compared with accelerate's."""

from __future__ import annotations

from typing import Any

import accelerate.hooks as reference
import pytest
import torch
from tests.versions import needs
from torch import fx, nn

from windlass.compat.big_models import model_hooks as ours
from windlass.compat.big_models.model_hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Plus(ModelHook):
    """Adds to the input, and notes what happens to it."""

    def __init__(self, amount: float) -> None:
        self.amount, self.log = amount, []  # type: ignore[var-annotated]

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.log.append("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.amount, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append("post")
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.log.append("detach")
        return module


@pytest.mark.parametrize(
    "name",
    [
        "ModelHook",
        "SequentialHook",
        "AlignDevicesHook",
        "CpuOffload",
        "UserCpuOffloadHook",
        pytest.param("LayerwiseCastingHook", marks=needs("accelerate", "1.8", "older ones have none")),
    ],
)
def test_classes_have_the_methods_of_the_reference(name: str) -> None:
    from windlass.compat.big_models import attach_hooks, module_tensors, offloaded

    theirs = {attribute for attribute in vars(getattr(reference, name)) if not attribute.startswith("_")}
    mine = next(
        getattr(module, name)
        for module in (ours, offloaded, attach_hooks, module_tensors)
        if hasattr(module, name)
    )
    assert theirs <= set(dir(mine))


def test_a_hook_sees_inputs_and_is_removed_without_a_trace() -> None:
    layer, x = nn.Linear(3, 3), torch.rand(2, 3)
    before, attributes = layer(x), set(vars(layer))
    hook = Plus(1.0)
    assert add_hook_to_module(layer, hook) is layer
    assert torch.equal(layer(x), nn.functional.linear(x + 1, layer.weight, layer.bias))
    assert layer.forward.__name__ == "forward"
    remove_hook_from_module(layer)
    assert torch.equal(layer(x), before)
    assert set(vars(layer)) == attributes
    assert hook.log == ["init", "post", "detach"]


def test_a_second_hook_replaces_the_first_or_joins_it() -> None:
    layer, x = nn.Identity(), torch.zeros(1)
    add_hook_to_module(layer, Plus(1.0))
    add_hook_to_module(layer, Plus(2.0))
    assert layer(x).item() == 2
    add_hook_to_module(layer, Plus(3.0), append=True)
    add_hook_to_module(layer, Plus(4.0), append=True)
    assert layer(x).item() == 9
    assert isinstance(layer._hf_hook, SequentialHook)
    remove_hook_from_module(layer)
    assert layer(x).item() == 0


def test_hooks_are_removed_from_all_that_is_inside() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_forward_that_was_the_instances_own_comes_back() -> None:
    layer = nn.Identity()
    layer.forward = lambda x: x * 5  # type: ignore[method-assign]
    add_hook_to_module(layer, Plus(1.0))
    assert layer(torch.ones(1)).item() == 10
    remove_hook_from_module(layer)
    assert layer(torch.ones(1)).item() == 5


def test_no_grad_hooks_run_without_gradients() -> None:
    class Quiet(ModelHook):
        no_grad = True

    layer = add_hook_to_module(nn.Linear(1, 1), Quiet())
    assert not layer(torch.ones(1)).requires_grad


def test_traced_modules_still_recompile() -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    add_hook_to_module(traced, Plus(1.0))
    assert traced(torch.zeros(1)).item() == 1
    remove_hook_from_module(traced)
    traced.recompile()
    assert traced(torch.zeros(1)).item() == 0
