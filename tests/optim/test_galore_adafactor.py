"""GaLore with Adafactor against Adafactor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from windlass.optim.optimizers.adafactor import Adafactor
from windlass.optim.optimizers.galore_adafactor import GaLoreAdafactor
from windlass.optim.optimizers.low_rank import bases


def drawn(*shape: int, count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_at_full_rank_it_is_adafactor_in_the_rotated_basis(
    shape: tuple[int, int], beta1: float | None
) -> None:
    found = drawn(*shape)
    basis = bases(found[0], min(shape), "std")
    weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    rotated = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    groups = [{"params": [weight], "projected": True}]
    ours = GaLoreAdafactor(groups, lr=0.1, beta1=beta1, rank=min(shape), scale=1.0)
    theirs = Adafactor([rotated], lr=0.1, beta1=beta1, relative_step=False, scale_parameter=False)
    for grad in found:
        weight.grad = grad.clone()
        rotated.grad = grad @ basis["right"].T if "right" in basis else basis["left"].T @ grad
        ours.step()
        theirs.step()
    back = rotated @ basis["right"] if "right" in basis else basis["left"] @ rotated
    torch.testing.assert_close(weight.detach(), back.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 4), (5,)])
@pytest.mark.parametrize("beta1", [None, 0.9])
def test_other_parameters_are_updated_as_adafactor_does(shape: tuple[int, ...], beta1: float | None) -> None:
    ours, theirs = (nn.Parameter(torch.ones(shape, dtype=torch.float64)) for _ in range(2))
    optimizer = GaLoreAdafactor([ours], lr=0.1, beta1=beta1, weight_decay=0.1)
    reference = Adafactor(
        [theirs], lr=0.1, beta1=beta1, weight_decay=0.1, relative_step=False, scale_parameter=False
    )
    for grad in drawn(*shape):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_its_state_is_the_basis_and_one_row_and_column_of_the_projection() -> None:
    weight = nn.Parameter(torch.ones(12, 4))
    optimizer = GaLoreAdafactor([{"params": [weight], "projected": True}], rank=2)
    weight.grad = drawn(12, 4, count=1)[0].float()
    optimizer.step()
    state = optimizer.state[weight]
    assert {key: tuple(value.shape) for key, value in state.items() if key != "step"} == {
        "right": (2, 4),
        "exp_avg_sq_row": (12,),
        "exp_avg_sq_col": (2,),
    }
