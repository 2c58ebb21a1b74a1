"""Weights that hooks keep elsewhere between forwards, those of accelerate included."""

from __future__ import annotations

import accelerate
import pytest
import torch
from tests.compat.big_models import IDS, seeded

from windlass import Accelerator
from windlass.accelerator.offloaded_weights import (
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_parameter,
)
from windlass.core.errors import ModelError


def test_a_model_that_accelerate_offloaded_is_read_whole() -> None:
    model, whole = accelerate.cpu_offload(seeded(), "cpu"), seeded().state_dict()
    assert any(map(has_offloaded_params, model.modules()))
    assert model.embedding.weight.is_meta
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    prepared = Accelerator(cpu=True).prepare_model(model, evaluation_mode=True)
    with torch.no_grad():
        assert torch.equal(prepared(IDS), seeded()(IDS))


def test_a_model_without_hooks_has_nothing_offloaded() -> None:
    model = seeded()
    assert not any(map(has_offloaded_params, model.modules()))
    with pytest.raises(ModelError, match=r"norm\.weight is not among the offloaded weights"):
        load_offloaded_parameter(model, "norm.weight")
