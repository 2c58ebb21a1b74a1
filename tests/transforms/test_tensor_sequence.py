"""Ranks that divide the positions of hidden states between the layers that they divide."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch
from tests.versions import with_pinned

pytest.importorskip("transformers")


@pytest.mark.dist
@pytest.mark.parametrize(
    "what", ["equal", pytest.param("costs", marks=with_pinned("transformers")), "drops", "refused"]
)
def test_divided_positions(what: str) -> None:
    launch(2, Path(__file__).with_name("positions_ranks.py"), what)
