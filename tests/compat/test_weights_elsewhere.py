"""Weights that come for a forward and go again."""

from __future__ import annotations

import pytest
import torch
from tests.compat.big_models import IDS, Block, seeded
from torch import Tensor, nn

from windlass.accelerator.offloaded_weights import (
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_parameter,
    offload_hook,
)
from windlass.compat.big_models.attach_hooks import (
    PrefixedDataset,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    extract_submodules_state_dict,
    shared_weights,
)
from windlass.compat.big_models.model_hooks import (
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from windlass.compat.big_models.module_tensors import find_tied_parameters
from windlass.compat.big_models.offloaded import AlignDevicesHook
from windlass.core.errors import ModelError


def test_a_layer_has_its_weights_during_its_forward_alone() -> None:
    layer, x = nn.Linear(2, 2), torch.rand(1, 2)
    expected, weight = layer(x), layer.weight.detach().clone()
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    assert layer.weight.is_meta
    placeholder = layer.weight
    assert torch.equal(layer(x), expected)
    assert layer.weight is placeholder, "the placeholder of a weight stays the same object"
    remove_hook_from_module(layer)
    assert torch.equal(layer.weight, weight)
    assert layer.weight.requires_grad


def test_a_forward_that_fails_lets_go_of_its_weights() -> None:
    model = seeded()
    attach_align_device_hook(model, "cpu", offload=True)
    with pytest.raises(IndexError):
        model(IDS + 100)
    assert all(param.is_meta for param in model.parameters())
    assert torch.equal(model(IDS), seeded()(IDS))


def test_copies_for_a_forward_get_no_gradient() -> None:
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", offload=True))
    x = torch.rand(1, 2, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_buffers_go_when_asked_and_those_outside_the_state_stay(offload_buffers: bool) -> None:
    block, x = Block(), torch.rand(2, 8)
    expected = block(x)
    attach_align_device_hook(block, "cpu", offload=True, offload_buffers=offload_buffers)
    assert block.shift.is_meta is offload_buffers
    assert not block.factor.is_meta
    assert all(param.is_meta for param in block.parameters())
    assert torch.equal(block(x), expected)
    remove_hook_from_submodules(block)
    assert not any(tensor.is_meta for tensor in [*block.parameters(), *block.buffers()])
    assert torch.equal(block(x), expected)


def test_what_has_no_data_anywhere_is_named() -> None:
    with pytest.raises(ModelError, match="no data for bias, weight of a Linear"):
        add_hook_to_module(
            nn.Linear(2, 2, device="meta"), AlignDevicesHook("cpu", offload=True, weights_map={})
        )


def test_weights_are_read_from_the_map_each_time() -> None:
    class Counting(dict[str, Tensor]):
        reads = 0

        def __getitem__(self, key: str) -> Tensor:
            Counting.reads += 1
            return super().__getitem__(key)

    layer = nn.Linear(2, 2, device="meta")
    weights = Counting(weight=torch.eye(2), bias=torch.ones(2))
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert Counting.reads == 0
    for _ in range(3):
        assert torch.equal(layer(torch.ones(2)), torch.full((2,), 2.0))
    assert Counting.reads == 6
    assert torch.equal(load_offloaded_parameter(layer, "weight"), torch.eye(2))


def test_ties_are_one_placeholder_and_one_weight_again() -> None:
    model = seeded()
    expected = model(IDS)
    ties = shared_weights(find_tied_parameters(model))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, weights_map=state, tied_params_map=ties)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.is_meta
    assert torch.equal(model(IDS), expected)
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(IDS), expected)


def test_ties_inside_a_module_that_is_brought_whole() -> None:
    model = seeded()
    expected = model(IDS)
    ties = shared_weights(find_tied_parameters(model))
    attach_align_device_hook(
        model, "cpu", offload=True, preload_module_classes=["Model"], tied_params_map=ties
    )
    assert offload_hook(model) is not None
    assert not any(has_offloaded_params(child) for child in model.children())
    assert torch.equal(model(IDS), expected)
    assert model.head.weight is model.embedding.weight
    remove_hook_from_submodules(model)
    assert torch.equal(model(IDS), expected)


def test_children_used_without_a_call_need_their_parent_preloaded() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.dense.weight + self.dense.bias

    model, x = Direct(), torch.rand(2, 3)
    expected = model(x)
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=["Direct"])
    assert torch.equal(model(x), expected)
    assert model.dense.weight.is_meta


def test_a_module_under_two_names_is_hooked_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = nn.ModuleDict({"again": model["a"]})
    attach_align_device_hook(model, "cpu", offload=True)
    assert isinstance(model["a"]._hf_hook, AlignDevicesHook)
    x = torch.rand(1, 2)
    assert torch.equal(model["b"]["again"](x), model["a"](x))


def test_blocks_are_placed_by_map_and_tensors_by_name() -> None:
    model = seeded()
    expected = model(IDS)
    offload = {"embedding": True, "position": True, "blocks": False, "norm": True, "head": False}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = extract_submodules_state_dict(state, [name for name, away in offload.items() if away])
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", **dict.fromkeys(offload, "cpu")},
        offload=offload,
        weights_map=weights,
    )
    assert model.position.is_meta
    assert model.embedding.weight.is_meta
    assert not model.blocks[0].scale.is_meta
    assert torch.equal(model(IDS), expected)
    assert torch.equal(load_offloaded_parameter(model, "position"), weights["position"])
    with pytest.raises(ModelError, match=r"blocks\.0\.scale"):
        load_offloaded_parameter(model, "blocks.0.scale")
    whole = get_state_dict_offloaded_model(model)
    assert whole.keys() == state.keys()
    assert all(torch.equal(whole[name], state[name]) for name in state)


@pytest.mark.parametrize("offload", [False, True])
def test_one_device_for_all(offload: bool) -> None:
    model = seeded()
    expected = model(IDS)
    attach_align_device_hook_on_blocks(model, "cpu", offload)
    assert all(param.is_meta is offload for param in model.parameters())
    assert torch.equal(model(IDS), expected)


def test_inputs_follow_and_outputs_return() -> None:
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, AlignDevicesHook("meta", io_same_device=True, skip_keys="kept"))
    args, kwargs = layer._hf_hook.pre_forward(layer, torch.ones(2), kept=torch.ones(1), moved=torch.ones(1))
    assert args[0].is_meta
    assert kwargs["moved"].is_meta
    assert not kwargs["kept"].is_meta
    assert layer._hf_hook.input_device == torch.device("cpu")


def test_modules_without_tensors_get_no_hook_for_inputs() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
    attach_execution_device_hook(model, "cpu")
    assert [hasattr(child, "_hf_hook") for child in model] == [True, False, True]
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    attach_execution_device_hook(model, "cpu", preload_module_classes=["Sequential"])
    assert not hasattr(model[0], "_hf_hook")


def test_maps_behind_a_prefix() -> None:
    inner = PrefixedDataset({"a.x": 1, "a.y": 2, "b.x": 3}, "a.")
    assert dict(inner) == {"x": 1, "y": 2}
    assert len(inner) == 2
    assert "x" in inner
    assert "z" not in inner


def test_the_state_of_some_modules() -> None:
    state = dict.fromkeys(["h.1.w", "h.10.w", "p", "pp"], torch.ones(1))
    assert set(extract_submodules_state_dict(state, ["h.1", "p"])) == {"h.1.w", "p"}
    assert set(extract_submodules_state_dict(state, [""])) == set(state)
