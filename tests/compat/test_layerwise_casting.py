"""Weights stored small and computed large, compared with accelerate's."""

from __future__ import annotations

import accelerate
import pytest
import torch
from tests.compat.big_models import IDS, Block, seeded
from tests.versions import needs
from torch import nn

from windlass.compat.big_models.attach_hooks import attach_layerwise_casting_hooks
from windlass.compat.big_models.model_hooks import remove_hook_from_submodules

CASES = [
    {},
    {"skip_modules_pattern": ["head", r"blocks\.1"]},
    {"skip_modules_classes": (Block,)},
    {"skip_modules_pattern": ("inner.0",), "non_blocking": True},
]


@needs("accelerate", "1.8", "older ones have no such hooks")
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
def test_dtypes_and_results_are_those_of_the_reference(options: dict, storage: torch.dtype) -> None:
    ours, theirs = seeded(tied=False), seeded(tied=False)
    attach_layerwise_casting_hooks(ours, storage, torch.float32, **options)
    accelerate.big_modeling.attach_layerwise_casting_hooks(theirs, storage, torch.float32, **options)
    dtypes = {name: param.dtype for name, param in ours.named_parameters()}
    assert dtypes == {name: param.dtype for name, param in theirs.named_parameters()}
    assert storage in dtypes.values()
    with torch.no_grad():
        assert torch.equal(ours(IDS), theirs(IDS))
    assert dtypes == {name: param.dtype for name, param in ours.named_parameters()}, (
        "small again after the forward"
    )


def test_one_pattern_may_be_a_plain_text() -> None:
    model = seeded(tied=False)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern="head")
    assert model.head.weight.dtype == torch.float32
    assert model.blocks[0].inner[0].weight.dtype == torch.bfloat16


def test_a_single_layer_and_removal() -> None:
    layer = nn.Linear(2, 2)
    attach_layerwise_casting_hooks(layer, torch.bfloat16, torch.float32)
    assert layer(torch.ones(2)).dtype == torch.float32
    remove_hook_from_submodules(layer)
    assert layer(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
