"""Tensors of a module by name."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import modeling as reference
from tests.compat.big_models import Model, seeded
from tests.versions import needs
from torch import nn

from windlass.compat.big_models.module_tensors import (
    SharedWeight,
    device_of,
    find_tied_parameters,
    get_non_persistent_buffers,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
    torch_dtype,
)
from windlass.core.errors import ModelError


@pytest.mark.parametrize("recurse", [False, True])
@pytest.mark.parametrize("buffers", [False, True])
def test_names_are_those_of_the_reference(recurse: bool, buffers: bool) -> None:
    model = Model()
    ours = [name for name, _ in named_module_tensors(model, buffers, recurse)]
    assert ours == [name for name, _ in reference.named_module_tensors(model, buffers, recurse)]


@needs("accelerate", "1.8", "older ones do not give full names")
def test_non_persistent_buffers_of_submodules_are_left_out_too() -> None:
    model = Model(layers=1)
    names = {name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)}
    assert "blocks.0.factor" not in names
    assert "blocks.0.shift" in names
    for recurse in (False, True):
        assert get_non_persistent_buffers(model, recurse) == reference.get_non_persistent_buffers(
            model, recurse
        )
    model.register_buffer("mask", torch.ones(1), persistent=False)
    # The reference also has a name with a leading dot for each buffer of the model's own.
    theirs = reference.get_non_persistent_buffers(model, recurse=True, fqns=True) - {".mask"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == theirs == {"blocks.0.factor", "mask"}


def test_a_tensor_goes_to_meta_and_comes_back_with_a_value() -> None:
    model = seeded()
    value = model.blocks[0].scale.detach().clone()
    set_module_tensor_to_device(model, "blocks.0.scale", "meta")
    assert model.blocks[0].scale.is_meta
    set_module_tensor_to_device(model, "blocks.0.scale", "cpu", value=value.double())
    assert model.blocks[0].scale.dtype == torch.float32, "the dtype in the model decides"
    assert torch.equal(model.blocks[0].scale, value)
    set_module_tensor_to_device(model, "blocks.0.scale", "cpu", value=value, dtype="torch.float16")
    assert model.blocks[0].scale.dtype == torch.float16
    assert isinstance(model.blocks[0].scale, nn.Parameter)


def test_whole_numbers_are_not_cast() -> None:
    norm = nn.BatchNorm1d(2)
    set_module_tensor_to_device(
        norm, "num_batches_tracked", "cpu", value=torch.tensor(7), dtype=torch.float16
    )
    assert norm.num_batches_tracked.dtype == torch.int64
    assert int(norm.num_batches_tracked) == 7


def test_frozen_parameters_stay_frozen() -> None:
    layer = nn.Linear(2, 2).requires_grad_(False)
    set_module_tensor_to_device(layer, "weight", "meta")
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    assert not layer.weight.requires_grad


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nothing", None, "no parameter or buffer 'nothing'"),
        ("deep.nothing", None, "no module 'deep'"),
        ("weight", torch.ones(3), r"shape \(2, 2\) in the model, and \(3,\) was given"),
        ("bias", None, "bias is None"),
    ],
)
def test_what_cannot_be_done_is_named(name: str, value: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        set_module_tensor_to_device(nn.Linear(2, 2, bias=False), name, "cpu", value=value)


def test_a_tensor_without_data_needs_a_value() -> None:
    with pytest.raises(ModelError, match="weight is on the meta device"):
        set_module_tensor_to_device(nn.Linear(2, 2, device="meta"), "weight", "cpu")


def test_shared_copies_are_taken_and_not_kept_alive() -> None:
    shared, first, second = SharedWeight(), nn.Linear(2, 2), nn.Linear(2, 2)
    set_module_tensor_to_device(first, "weight", "cpu", value=torch.ones(2, 2), tied_params_map=shared)
    set_module_tensor_to_device(second, "weight", "cpu", value=torch.ones(2, 2), tied_params_map=shared)
    assert first.weight is second.weight
    first.weight = second.weight = None  # type: ignore[assignment]
    assert not shared


def test_names_of_dtypes() -> None:
    assert torch_dtype("torch.bfloat16") is torch_dtype("bfloat16") is torch.bfloat16
    assert torch_dtype(None) is None
    with pytest.raises(ModelError, match="no dtype 'float17'"):
        torch_dtype("float17")


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_a_device_without_an_index_is_the_current_one() -> None:
    kind = torch.zeros(1, device=torch.accelerator.current_accelerator()).device.type
    with torch.accelerator.device_index(1):
        assert device_of(kind) == torch.zeros(1, device=kind).device


def test_a_device_without_an_index_is_one_with_an_index() -> None:
    assert device_of("cuda") == torch.device("cuda:0")
    assert device_of("cuda") != device_of("cuda:1")
    assert device_of("cuda") != device_of("cpu")


def test_ties_are_found_as_the_reference_finds_them_and_tied_again() -> None:
    model = Model()
    model.blocks[1].scale = model.blocks[0].scale
    model.blocks[2].scale = model.blocks[0].scale
    tied = find_tied_parameters(model)
    assert sorted(tied) == sorted(reference.find_tied_parameters(model))
    model.blocks[1].scale = nn.Parameter(torch.zeros(8))
    set_module_tensor_to_device(model, "blocks.0.scale", "meta")
    retie_parameters(model, tied)
    assert model.blocks[0].scale is model.blocks[1].scale is model.blocks[2].scale
    assert not model.blocks[0].scale.is_meta
    assert find_tied_parameters(Model(tied=False)) == []
