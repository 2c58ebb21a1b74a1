"""What forwards change in a model, taken and put back (in runs and on ranks: `checkpoint/test_own_state.py`)."""

from __future__ import annotations

import torch
from torch import nn

from windlass.transforms.buffers import ForwardState, OwnState


class Counting(nn.Module):
    """A buffer that the state dict leaves out, and an extra state that can be changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen = [0]

    def get_extra_state(self) -> dict[str, list[int]]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, list[int]]) -> None:
        self.seen = state["seen"]

    def change(self) -> None:
        self.scratch.fill_(7)
        self.seen.append(7)


def test_a_state_can_be_restored_again() -> None:
    module = Counting()
    before = ForwardState(module)
    for _ in range(2):
        module.change()
        before.restore()
        assert (module.scratch.tolist(), module.seen) == ([0, 0], [0])


def test_a_buffer_that_was_not_saved_returns_to_what_it_was_then() -> None:
    """It had not changed when the checkpoint was saved, to which a run goes back."""
    module = Counting()
    own = OwnState(module, differs=False)
    saved = {**own.state_dict()}
    assert "scratch" not in saved
    module.scratch.fill_(7)
    assert "scratch" in own.state_dict()
    own.load_state_dict(saved)
    assert module.scratch.tolist() == [0, 0]
