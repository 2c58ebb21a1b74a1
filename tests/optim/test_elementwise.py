"""The base of elementwise optimizers: what it refuses, closures, and complex parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ModelError
from windlass.optim.groups import arranged
from windlass.optim.optimizers.lion import Lion
from windlass.optim.optimizers.stable_adamw import StableAdamW
from windlass.optim.registry import make_optimizer, optimizer_factory


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match="Lion cannot use sparse gradients"):
        Lion(table.parameters()).step()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lr": -1.0}, "lr=-1.0"), ({"betas": (0.9, 1.0)}, "below 1"), ({"eps": float("nan")}, "eps=nan")],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StableAdamW([nn.Parameter(torch.ones(1))], **options)


def test_a_closure_computes_the_loss_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = Lion([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert weight.item() == pytest.approx(0.9)


ELEMENTWISE = (
    "lion_32bit", "ademamix", "stable_adamw", "grokadamw", "adamw_anyprecision", "schedule_free_adamw",
    "schedule_free_radam", "schedule_free_sgd", "muon",
)  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_complex_parameter_is_updated_as_pairs_of_real_numbers(name: str) -> None:
    """As in torch's optimizers."""
    cls, kwargs = optimizer_factory(OptimizerPlan(name, learning_rate=0.01))
    start = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    wave, pairs = nn.Parameter(start.clone()), nn.Parameter(torch.view_as_real(start).clone())
    module = nn.ParameterDict({"wave": wave, "pairs": pairs})
    optimizer = make_optimizer(arranged(module, cls, [{"params": [wave]}, {"params": [pairs]}]), cls, kwargs)
    for _ in range(8):  # RAdam makes its first update after five
        wave.grad = wave.detach().conj().resolve_conj() + 1j
        pairs.grad = torch.view_as_real(wave.grad).clone()
        optimizer.step()
    assert torch.equal(torch.view_as_real(wave.detach()), pairs)
    assert not torch.equal(wave.detach(), start)
    if name.startswith("schedule_free"):
        optimizer.eval()  # type: ignore[attr-defined]
        assert torch.allclose(torch.view_as_real(wave.detach()), pairs)
