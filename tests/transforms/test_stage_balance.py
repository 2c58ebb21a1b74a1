"""What a stage sends beside its tensor. What stages compute with it is in `tests/trainer/test_pipeline_runs.py`."""

from __future__ import annotations

import pytest
import torch

from windlass.transforms.stage_balance import Apart, Together


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_and_their_gradients_travel_to_the_bit(dtype: torch.dtype) -> None:
    states = torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)
    wide = torch.promote_types(dtype, torch.float32)
    sums = torch.full((3, 5), 4097.125, dtype=wide, requires_grad=True)  # bfloat16 would round it
    joined = Together.apply(states, sums)
    assert joined.dtype == dtype
    received = joined.detach().requires_grad_()
    found, found_sums = Apart.apply(received, 5)
    assert torch.equal(found, states)
    assert torch.equal(found_sums, sums)
    torch.autograd.backward((found, found_sums), (torch.full_like(found, 2), torch.full_like(sums, 4097.5)))
    joined.backward(received.grad)
    assert states.grad is not None
    assert sums.grad is not None
    assert torch.equal(states.grad, torch.full_like(states, 2))
    assert torch.equal(sums.grad, torch.full_like(sums, 4097.5))
