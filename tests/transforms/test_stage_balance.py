"""What a stage sends beside its tensor. What stages compute with it is in `tests/trainer/test_pipeline_runs.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang
from windlass.transforms.pipeline_cut import Cut
from windlass.transforms.stage_balance import Apart, StageBalance, Together


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


class Scaled(nn.Module):
    """Its output has what its router returns, times two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)

    def forward(self, states: Tensor) -> dict[str, tuple[Tensor]]:
        return {"router_logits": (self.router(states) * 2,)}


def test_a_router_that_is_not_found_is_refused() -> None:
    model = Scaled()
    balance = StageBalance(model, Gang(), False, lambda: False)
    with pytest.raises(ModelError, match="Scaled changes what its routers return"):
        balance.cut(lambda: (Cut([], [], {}), model(torch.ones(2, 4))))
    assert not model.router._forward_hooks
