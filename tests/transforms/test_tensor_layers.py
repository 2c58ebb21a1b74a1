"""Attentions of which each rank of a tensor gang has some heads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch

pytest.importorskip("transformers")


@pytest.mark.dist
def test_ranks_have_some_heads() -> None:
    launch(2, Path(__file__).with_name("heads_ranks.py"), "opt", "gptj", "bloom", "t5", "mt5", "umt5")
