"""A loss on a head that is divided over the vocabulary is that of a whole one, and no rank makes whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch

pytest.importorskip("transformers")
RANKS = Path(__file__).with_name("split_ranks.py")


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_a_tensor_gang_make_the_loss_of_whole_logits(ranks: int) -> None:
    launch(ranks, RANKS)
