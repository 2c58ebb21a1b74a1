"""Tied parameters, found and tied again."""

from __future__ import annotations

import torch
from accelerate.utils import modeling as reference
from tests.transforms.big_models import Model
from torch import nn

from windlass.compat.ties import find_tied_parameters, retie_parameters
from windlass.transforms.module_tensors import set_module_tensor_to_device


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
