"""Which tensors share memory."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from windlass.dist.views import overlapping


def test_views_of_one_memory_overlap() -> None:
    memory = torch.zeros(8)
    tensors = {"front": memory[:5], "back": memory[4:], "apart": torch.zeros(8)}
    assert [sorted(names) for names in overlapping(tensors)] == [["back", "front"]]
    assert not list(overlapping({"front": memory[:4], "back": memory[4:]}))


def test_tensors_without_memory_of_their_own_do_not_overlap() -> None:
    """As those of a quantized weight, which are all at the same address."""
    made = {name: TwoTensor(torch.zeros(4), torch.zeros(4)) for name in "ab"}
    assert made["a"].data_ptr() == made["b"].data_ptr()
    assert not list(overlapping(made))
