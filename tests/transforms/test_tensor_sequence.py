"""Ranks that divide the positions of hidden states between the layers that they divide."""

from __future__ import annotations

import pytest
from tests.dist.launch import on_ranks
from tests.transforms import positions_ranks
from tests.versions import with_pinned

pytest.importorskip("transformers")


@pytest.mark.dist
@pytest.mark.parametrize(
    "what", ["equal", pytest.param("costs", marks=with_pinned("transformers")), "drops", "refused"]
)
def test_divided_positions(what: str) -> None:
    on_ranks(2, positions_ranks.main, what)
