"""APOLLO against the formulas of arXiv:2412.05270."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError
from windlass.optim.optimizers.apollo_adamw import ApolloAdamW


def gradients(shape: tuple[int, int], count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def updated(shape: tuple[int, int], grads: list[Tensor], start: float = 0.0, **options: Any) -> Tensor:
    weight = nn.Parameter(torch.full(shape, start, dtype=torch.float64))
    optimizer = ApolloAdamW([{"params": [weight], "projected": True}], lr=0.1, **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_it_is_the_algorithm_of_the_paper(shape: tuple[int, int], scale_type: str) -> None:
    rank, gap, scale = 2, 2, 4.0
    wide = shape[0] < shape[1]
    expected = torch.zeros(shape, dtype=torch.float64)
    first = second = before = None
    for step, grad in enumerate(gradients(shape)):
        generator = torch.Generator().manual_seed(step // gap)
        size = (shape[0], rank) if wide else (rank, shape[1])
        drawn = torch.randn(size, generator=generator, dtype=torch.float64) / rank**0.5
        low = drawn.T @ grad if wide else grad @ drawn.T
        first = 0.1 * low if first is None else 0.9 * first + 0.1 * low
        second = 0.001 * low**2 if second is None else 0.999 * second + 0.001 * low**2
        normal = (first / (1 - 0.9 ** (step + 1))) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
        if scale_type == "tensor":
            change = grad * (normal.norm() / low.norm())
        else:
            dim = 0 if wide else 1
            change = grad * (normal.norm(dim=dim, keepdim=True) / low.norm(dim=dim, keepdim=True))
        if before is not None and change.norm() > 1.01 * before:
            change = change * (1.01 * before / change.norm())
        before = change.norm()
        expected = expected - 0.1 * scale**0.5 * change
    found = updated(
        shape, gradients(shape), rank=rank, update_proj_gap=gap, scale=scale, scale_type=scale_type
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_weight_decay_is_decoupled_and_times_the_learning_rate() -> None:
    grads = gradients((4, 6), 1)
    moved, decayed = (updated((4, 6), grads, 2.0, rank=2, weight_decay=decay) for decay in (0.0, 0.3))
    torch.testing.assert_close(decayed, moved - 0.1 * 0.3 * 2.0, rtol=0, atol=1e-14)


def test_with_singular_vectors_the_state_has_them() -> None:
    weight = nn.Parameter(torch.zeros(6, 4))
    optimizer = ApolloAdamW([{"params": [weight], "projected": True}], rank=2, proj="svd")
    weight.grad = gradients((6, 4), 1)[0].float()
    optimizer.step()
    assert optimizer.state[weight]["right"].shape == (2, 4)


def test_random_matrices_are_not_in_the_state() -> None:
    weight = nn.Parameter(torch.zeros(12, 4))
    optimizer = ApolloAdamW([{"params": [weight], "projected": True}], rank=1)
    weight.grad = gradients((12, 4), 1)[0].float()
    optimizer.step()
    assert sum(t.numel() for t in optimizer.state[weight].values() if isinstance(t, Tensor)) == 2 * 12 + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proj": "hadamard"}, "use one of random, svd"),
        ({"scale_type": "row"}, "use one of channel, tensor"),
        ({"proj_type": "full"}, "use one of std, reverse_std, left, right"),
    ],
)
def test_unknown_words_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ApolloAdamW([nn.Parameter(torch.ones(2, 2))], rank=1, **options)
