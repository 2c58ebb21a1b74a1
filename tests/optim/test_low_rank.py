"""Gradients projected to a low rank, against the formulas of arXiv:2403.03507."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, NonFiniteError
from windlass.optim.optimizers.apollo_adamw import ApolloAdamW
from windlass.optim.optimizers.galore_adafactor import GaLoreAdafactor
from windlass.optim.optimizers.galore_adamw import GaLoreAdamW
from windlass.optim.optimizers.galore_adamw_8bit import GaLoreAdamW8bit
from windlass.optim.optimizers.low_rank import LowRankOptimizer, bases

SHAPES = [(6, 4), (4, 6), (5, 5)]
KINDS = ["std", "reverse_std", "left", "right", "full"]


class GaLoreSGD(LowRankOptimizer):
    """Plain SGD on projected gradients."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        projection = {"rank": 4, "update_proj_gap": 2, "scale": 1.0, "proj_type": "std"}
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, **projection, **options})

    def displacement(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad * group["lr"]


def gradients(shape: tuple[int, int], count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def projected(parameter: nn.Parameter) -> list[dict[str, Any]]:
    return [{"params": [parameter], "projected": True}]


# With the basis of the smaller side complete; of both sides only for a square matrix.
COMPLETE = [("std", s) for s in SHAPES] + [
    ("left", (4, 6)),
    ("right", (6, 4)),
    ("full", (5, 5)),
    ("left", (5, 5)),
]


@pytest.mark.parametrize(("kind", "shape"), COMPLETE)
def test_at_full_rank_and_scale_one_it_is_sgd(kind: str, shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    plain = nn.Parameter(weight.detach().clone())
    ours = GaLoreSGD(projected(weight), 0.1, rank=min(shape), update_proj_gap=3, proj_type=kind)
    theirs = torch.optim.SGD([plain], lr=0.1)
    for grad in gradients(shape, 5):
        weight.grad, plain.grad = grad.clone(), grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(weight, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_at_full_rank_it_is_adamw_in_the_rotated_basis(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    rotated = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    ours = GaLoreAdamW(projected(weight), lr=0.1, rank=min(shape), update_proj_gap=100, scale=1.0)
    theirs = torch.optim.AdamW([rotated], lr=0.1, weight_decay=0.0)
    found = gradients(shape, 5)
    basis = bases(found[0], min(shape), "std")
    for grad in found:
        weight.grad = grad.clone()
        rotated.grad = grad @ basis["right"].T if "right" in basis else basis["left"].T @ grad
        ours.step()
        theirs.step()
    back = rotated @ basis["right"] if "right" in basis else basis["left"] @ rotated
    torch.testing.assert_close(weight.detach() - 1, back.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_of_rank_r_it_is_the_algorithm_of_the_paper(shape: tuple[int, int]) -> None:
    rank, gap, alpha, lr = 2, 2, 0.25, 0.1
    weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    ours = GaLoreAdamW(projected(weight), lr=lr, rank=rank, update_proj_gap=gap, scale=alpha, eps=0.0)
    expected = torch.ones(shape, dtype=torch.float64)
    first = second = torch.zeros(())
    for step, grad in enumerate(gradients(shape, 5)):
        flat = grad if shape[0] <= shape[1] else grad.T  # the paper's m <= n
        if step % gap == 0:
            basis = torch.linalg.svd(flat)[0][:, :rank]
        low = basis.T @ flat
        first, second = 0.9 * first + 0.1 * low, 0.999 * second + 0.001 * low**2
        normal = (first / (1 - 0.9 ** (step + 1))) / (second / (1 - 0.999 ** (step + 1))).sqrt()
        change = alpha * basis @ normal
        expected = expected - lr * (change if shape[0] <= shape[1] else change.T)
        weight.grad = grad.clone()
        ours.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_stays_below_the_bound_of_the_paper(kind: str) -> None:
    small, large, rank = 4, 12, 2
    for shape in ((small, large), (large, small)):
        weight = nn.Parameter(torch.ones(shape))
        optimizer = GaLoreAdamW(projected(weight), rank=rank, proj_type=kind)
        weight.grad = gradients(shape, 1)[0].float()
        optimizer.step()
        numbers = sum(t.numel() for t in optimizer.state[weight].values() if isinstance(t, Tensor))
        assert numbers <= rank * (small + 2 * large)
        if kind == "std":
            assert numbers == rank * (small + 2 * large)


def test_a_new_basis_is_found_in_every_gap_th_update() -> None:
    weight = nn.Parameter(torch.ones(6, 4, dtype=torch.float64))
    optimizer = GaLoreAdamW(projected(weight), rank=2, update_proj_gap=3)
    seen = []
    for grad in gradients((6, 4), 7):
        weight.grad = grad.clone()
        optimizer.step()
        seen.append(optimizer.state[weight]["right"])
    assert [a is b for a, b in itertools.pairwise(seen)] == [True, True, False, True, True, False]


def test_other_parameters_are_updated_as_adamw_does() -> None:
    start = [torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    optimizer = GaLoreAdamW(ours, lr=0.1, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1)
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = gradients(tuple(mine.shape), 1, seed=step)[0]  # type: ignore[arg-type]
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-14)


def test_groups_with_a_rank_of_their_own_are_projected() -> None:
    """As scripts write them for other implementations."""
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    groups = [{"params": [bias]}, {"params": [weight], "rank": 2, "update_proj_gap": 5, "scale": 0.5}]
    optimizer = GaLoreAdamW(groups)
    assert [group["projected"] for group in optimizer.param_groups] == [False, True]
    assert optimizer.param_groups[1]["proj_type"] == "std"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "optim_args.rank=0: must be at least 1"),
        ({"rank": 2, "update_proj_gap": 0}, "update_proj_gap=0: must be at least 1"),
        ({"rank": 2, "scale": 0.0}, "scale=0.0: must be above 0"),
        ({"rank": 2, "proj_type": "both"}, "use one of std, reverse_std, right, left, full"),
    ],
)
def test_a_projection_that_cannot_be_made_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GaLoreAdamW(projected(nn.Parameter(torch.ones(6, 4))), **options)
    assert message in str(caught.value)


PROJECTING: list[tuple[type[LowRankOptimizer], dict[str, Any]]] = [
    (GaLoreAdamW, {}),
    (GaLoreAdamW, {"proj_type": "full"}),
    (GaLoreAdamW8bit, {}),
    (GaLoreAdafactor, {}),
    (ApolloAdamW, {}),
    (ApolloAdamW, {"proj": "svd"}),
    (ApolloAdamW, {"scale_type": "tensor"}),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("cls", "options"), PROJECTING)
def test_above_its_full_rank_a_matrix_has_that(
    cls: Any, options: dict[str, Any], shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Which small projections have (grouped keys and values), and models smaller than the default rank."""
    weights = [nn.Parameter(torch.ones(shape)) for _ in range(2)]
    with caplog.at_level("INFO", logger="windlass"):
        optimizers = [
            cls(projected(weight), rank=rank, update_proj_gap=2, **options)
            for weight, rank in zip(weights, (128, min(shape)), strict=True)
        ]
    [said] = [record.getMessage() for record in caplog.records]
    assert said == (
        f"rank=128 is above the smaller side of 1 of the 1 projected weights (the smallest is {shape[0]} x "
        f"{shape[1]}): their full rank is used"
    )
    for grad in gradients(shape, 5):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = grad.float()
            optimizer.step()
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.ones(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_above_its_full_rank_it_is_the_reference(shape: tuple[int, int]) -> None:
    reference = pytest.importorskip("galore_torch.adamw", reason="needs the authors' package: galore-torch")
    # In fp32, in which it finds its basis: the signs of singular vectors in fp64 may be others.
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    options = {"rank": 128, "update_proj_gap": 2, "scale": 0.25}
    group = {"params": [theirs], **options, "proj_type": "std"}
    pairs = [
        (ours, GaLoreAdamW(projected(ours), lr=0.1, eps=0.0, **options)),
        (theirs, reference.AdamW([group], lr=0.1, eps=0.0, no_deprecation_warning=True)),
    ]
    for grad in gradients(shape, 5):
        for weight, optimizer in pairs:
            weight.grad = grad.float()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_vector_cannot_be_projected() -> None:
    with pytest.raises(ConfigError, match=r"only matrices.*\[3\]"):
        GaLoreAdamW(projected(nn.Parameter(torch.ones(3))), rank=1)


def test_half_precision_is_rounded_once() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    wide = nn.Parameter(torch.ones(4, 4))
    grad = gradients((4, 4), 1)[0].bfloat16()
    weight.grad, wide.grad = grad, grad.float()
    for parameter in (weight, wide):
        GaLoreAdamW(projected(parameter), lr=0.1, rank=2, weight_decay=0.1).step()
    assert torch.equal(weight, wide.bfloat16())


def test_a_gradient_that_is_not_finite_is_named_as_the_cause() -> None:
    """A run would find it out one update later, and stop for an error of linear algebra before."""
    with pytest.raises(
        NonFiniteError, match=r"gradient of a projected weight of shape \[3, 2\] is not finite"
    ):
        bases(torch.full((3, 2), float("nan")), 1, "std")
