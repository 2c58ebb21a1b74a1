"""Averages in 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from windlass.optim.optimizers.galore_adamw import GaLoreAdamW
from windlass.optim.optimizers.galore_adamw_8bit import BLOCK, GaLoreAdamW8bit, dequantise, levels, quantise


@pytest.mark.parametrize("signed", [True, False])
def test_there_are_256_levels_with_zero_and_the_largest(signed: bool) -> None:
    found = levels(signed)
    assert len(found) == len(set(found.tolist())) == 256
    assert {0.0, 1.0} <= set(found.tolist())
    assert bool((found < 0).any()) == signed


@pytest.mark.parametrize("signed", [True, False])
def test_the_levels_are_those_of_bitsandbytes(signed: bool) -> None:
    library = pytest.importorskip("bitsandbytes.functional")
    torch.testing.assert_close(levels(signed), library.create_dynamic_map(signed, 7, 8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(5, 100), (BLOCK,), (3,)])
def test_the_nearest_level_of_the_block_is_taken(signed: bool, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.square()
    codes, scale = quantise(values, signed)
    back = dequantise(codes, scale, signed)
    assert codes.dtype is torch.uint8
    assert len(scale) == -(-values.numel() // BLOCK)
    table = levels(signed)
    for value, found, block in zip(
        values.flatten(), back.flatten(), scale.repeat_interleave(BLOCK), strict=False
    ):
        fitting = table if signed or value == 0 else table[1:]
        nearest = fitting[(fitting - value / block).abs().argmin()] * block
        assert float(abs(value - found)) <= float(abs(value - nearest)) * (1 + 1e-4) + 1e-7


def test_a_block_of_zeros_stays_zero() -> None:
    assert not dequantise(*quantise(torch.zeros(300), True), True).any()


def test_galore_in_8_bits_is_close_to_that_in_32_and_smaller() -> None:
    shape, generator = (128, 96), torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    kinds = (GaLoreAdamW8bit, GaLoreAdamW)
    made = [
        k([{"params": [w], "projected": True}], lr=1e-2, rank=64) for k, w in zip(kinds, weights, strict=True)
    ]
    for _ in range(5):
        grad = torch.randn(shape, generator=generator)
        for weight, optimizer in zip(weights, made, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    small, large = (w.detach() for w in weights)
    assert float((small - large).norm() / large.norm()) < 0.1
    sizes = [
        sum(
            t.numel() * t.element_size()
            for k, t in o.state[w].items()
            if isinstance(t, Tensor) and "exp" in k
        )
        for o, w in zip(made, weights, strict=True)
    ]
    assert sizes[0] < 0.26 * sizes[1]


def test_few_numbers_stay_in_32_bits() -> None:
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    for kind, weight in zip((GaLoreAdamW8bit, GaLoreAdamW), weights, strict=True):
        weight.grad = torch.arange(16.0).view(4, 4)
        kind([{"params": [weight], "projected": True}], rank=2).step()
    assert torch.equal(*weights)


def test_a_small_second_moment_is_not_rounded_to_nothing() -> None:
    """An update is divided by its root, while the first moment may still have the gradient."""
    values = torch.tensor([1.0, 1e-12, 0.0])
    back = dequantise(*quantise(values, signed=False), signed=False)
    assert back[1] == levels(signed=False)[1] > 0
    assert back[2] == 0


def test_a_new_basis_makes_no_large_update() -> None:
    """Gradients of few samples have a low rank: in a new basis most of their numbers are nearly 0, and the moments are
    those of the old one.
    """
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(96, 96))
    optimizer = GaLoreAdamW8bit(
        [{"params": [weight], "projected": True}], lr=0.01, rank=48, update_proj_gap=2
    )
    for _ in range(5):
        before = weight.detach().clone()
        few = [torch.randn(shape, generator=generator) for shape in ((96, 8), (8, 96))]
        weight.grad = few[0] @ few[1]
        optimizer.step()
        assert (weight - before).abs().max() < 0.1
