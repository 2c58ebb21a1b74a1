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


class Routed(nn.Module):
    """Its output has what its router returns, times a number."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.router, self.factor = nn.Linear(4, 3), factor

    def forward(self, states: Tensor) -> dict[str, tuple[Tensor]]:
        logits = self.router(states)
        return {"router_logits": (logits if self.factor == 1 else logits * self.factor,)}

    def balance(self) -> StageBalance:
        found = StageBalance(self, Gang(), False, lambda: False)
        found.cut(lambda: (Cut([], [], {}), self(torch.ones(2, 4))))
        return found


def test_room_is_made_for_the_sums_of_a_router() -> None:
    states = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    sent = Together.apply(states, torch.zeros(3, 3))
    room = Routed(1).balance().room(states)
    assert (room.shape, room.dtype) == (sent.shape, sent.dtype)


def test_a_router_that_is_not_found_is_refused() -> None:
    with pytest.raises(ModelError, match="Routed changes what its routers return"):
        Routed(2).balance()
