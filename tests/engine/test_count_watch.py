"""What a loss does with its count is learned from one call, which computes the bits it would have computed anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.engine.count_watch import CountWatch, Use

Loss = Callable[[Tensor, Any], Tensor]

LOSSES: list[tuple[str, Loss, Use]] = [
    ("divide", lambda x, n: x.sum() / n, Use.DIVIDES),
    ("in place", lambda x, n: x.sum().div_(n), Use.DIVIDES),
    ("clamp", lambda x, n: x.sum() / n.clamp(min=1), Use.DIVIDES),
    ("max", lambda x, n: x.sum() / max(n, 1), Use.DIVIDES),
    ("float32", lambda x, n: x.sum() / n.to(torch.float32), Use.DIVIDES),
    ("device", lambda x, n: x.sum() / n.to(x.device), Use.DIVIDES),
    ("reciprocal", lambda x, n: x.sum() * (1 / n), Use.DIVIDES),
    ("bf16", lambda x, n: x.sum().bfloat16() / n, Use.DIVIDES),
    ("times ranks", lambda x, n: x.sum() * 2 / n, Use.DIVIDES),
    ("mean", lambda x, n: x.mean(), Use.IGNORES),
    ("compared", lambda x, n: x.mean() if n > 0 else x.sum(), Use.IGNORES),
    ("item", lambda x, n: x.sum() / n.item(), Use.UNKNOWN),
    ("float", lambda x, n: x.sum() / float(n), Use.UNKNOWN),
    ("mixed", lambda x, n: x.sum() / n + x.square().mean(), Use.MIXES),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("loss", "use"), [case[1:] for case in LOSSES], ids=[case[0] for case in LOSSES])
def test_uses_are_told_apart_and_change_no_bits(loss: Loss, use: Use, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.rand(7, dtype=dtype, requires_grad=True)
    plain = torch.tensor(7)
    expected = loss(x, plain)
    (gradient,) = torch.autograd.grad(expected, x)
    watch = CountWatch(lambda value: value)
    watched = loss(x, watch.count(7.0, plain))
    found = watch.judge(watched)
    assert found is not None
    assert found[0] is use
    assert (watched.dtype, type(watched)) == (expected.dtype, Tensor)
    assert torch.equal(watched, expected)
    assert torch.equal(torch.autograd.grad(watched, x)[0], gradient)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_loss_of_nothing_does_not_tell(value: float) -> None:
    watch = CountWatch(lambda found: found)
    watch.count(3.0, torch.tensor(3))
    assert watch.judge(torch.tensor(value, requires_grad=True)) is None
