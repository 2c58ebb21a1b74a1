from __future__ import annotations

import torch

from windlass.dist.flat import FlatParts, divided
from windlass.dist.sharded import whole


def test_one_rank_has_all_elements() -> None:
    values = torch.arange(6.0)
    parts = FlatParts((2, 3), values, 0, divided(6, 6, 1))
    assert torch.equal(whole(parts), values.view(2, 3))


def test_a_tensor_is_cut_where_the_buffer_is() -> None:
    assert divided(5, 4, 3, before=2) == [(0, 0, 2), (1, 2, 3)]
    assert divided(0, 4, 2) == []
