"""The autocast context: the right dtype, nothing for fp32, and safe to nest."""

from __future__ import annotations

import pytest
import torch

from windlass.config.plan import PrecisionPlan
from windlass.precision.check import autocast_context

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_matrix_product_computes_in_the_plans_dtype(compute: str, dtype: torch.dtype) -> None:
    context = autocast_context(PrecisionPlan(compute=compute), CPU)  # type: ignore[arg-type]
    layer = torch.nn.Linear(2, 2)
    for _ in range(2):  # re-usable
        with context():
            assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_contexts_nest_and_leave_nothing_behind(compute: str) -> None:
    context = autocast_context(PrecisionPlan(compute=compute), CPU)  # type: ignore[arg-type]
    with context():
        with context():
            pass
        assert torch.is_autocast_enabled("cpu") is (compute == "bf16")
    assert not torch.is_autocast_enabled("cpu")


def test_a_forward_without_gradients_leaves_the_next_one_its_own() -> None:
    """torch before 2.11 keeps the weights that it cast, and that they need no gradient."""
    layer = torch.nn.Linear(2, 2)
    with autocast_context(PrecisionPlan(compute="bf16"), CPU)():
        with torch.no_grad():
            layer(torch.ones(1, 2))
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
