"""Gradients pass through layers of 4 bits after an evaluation, and evaluating does not change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass import Accelerator
from windlass.core.errors import ModelError
from windlass.transforms.few_bits import keep_trainable

bnb = pytest.importorskip("bitsandbytes")


def four_bits() -> Any:
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    return nn.Sequential(nn.Linear(64, 64), layer.to("cpu"))


def evaluate(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(torch.ones(2, 64))  # type: ignore[no-any-return]


def packs(model: Any) -> bool:
    """Whether bitsandbytes packs on this processor."""
    return bool(model[1].support_avx512bf16_for_cpu)


def test_an_evaluation_before_training_changes_nothing() -> None:
    model = four_bits()
    keep_trainable(model)
    weight = model[1].weight.data.clone()
    before = evaluate(model)
    assert torch.equal(model[1].weight.data, weight)
    model.train()
    loss = model(torch.ones(2, 64)).sum()
    loss.backward()
    assert torch.equal(model(torch.ones(2, 64)), before)
    assert model[0].weight.grad.abs().sum() > 0


def test_prepared_models_stay_trainable() -> None:
    model = four_bits()
    accelerator = Accelerator(cpu=True)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    evaluate(prepared)
    prepared.train()
    accelerator.backward(prepared(torch.ones(2, 64)).sum())
    assert model[0].weight.grad.abs().sum() > 0


def test_a_packed_layer_is_refused() -> None:
    model = four_bits()
    if not packs(model):
        pytest.skip("bitsandbytes packs on processors with bf16 instructions only")
    evaluate(model)
    with pytest.raises(ModelError, match=r"1: bitsandbytes packed .* Load the model again"):
        keep_trainable(model)
