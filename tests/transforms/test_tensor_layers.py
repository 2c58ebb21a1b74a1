"""Attentions of which each rank of a tensor gang has some heads."""

from __future__ import annotations

import pytest
from tests.dist.launch import on_ranks
from tests.transforms import heads_ranks

pytest.importorskip("transformers")


@pytest.mark.dist
def test_ranks_have_some_heads() -> None:
    on_ranks(2, heads_ranks.main, ["opt", "gptj", "bloom", "t5", "mt5", "umt5"])
