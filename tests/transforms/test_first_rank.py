"""Models whose tensors share memory in ways that sharding would end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang
from windlass.transforms.first_rank import check_same_structure, to_meta


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_a_transposed_view_of_a_trained_weight_is_refused_by_name() -> None:
    model = layers()
    model[1].weight = nn.Parameter(model[0].weight.detach().T)
    with pytest.raises(ModelError, match=r"0\.weight, 1\.weight are views of the same memory"):
        check_same_structure(model, Gang())


def test_a_buffer_that_is_a_trained_weight_is_refused_by_name() -> None:
    model = layers()
    model.register_buffer("mirror", model[0].weight.detach())
    with pytest.raises(ModelError, match=r"0\.weight, mirror are views"):
        check_same_structure(model, Gang())


def test_what_is_tied_frozen_or_only_side_by_side_is_not() -> None:
    model = layers()
    model[1].weight = model[0].weight
    check_same_structure(model, Gang())
    frozen = layers().requires_grad_(False)
    frozen.register_buffer("mirror", frozen[0].weight.detach())
    check_same_structure(frozen, Gang())
    flat = torch.rand(18)
    beside = layers()
    for index, layer in enumerate(beside):
        layer.weight = nn.Parameter(flat[9 * index : 9 * index + 9].view(3, 3))
    check_same_structure(beside, Gang())


def test_on_the_meta_device_ties_and_frozen_weights_stay() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3), "frozen": nn.Linear(2, 2)})
    model["head"].weight = model["embed"].weight
    model["frozen"].requires_grad_(False)
    to_meta(model)
    assert model["head"].weight is model["embed"].weight
    assert [p.is_meta for p in model.parameters()] == [True] * 4
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
