"""A loss on a head that is divided over the vocabulary is that of a whole one, and no rank makes whole logits."""

from __future__ import annotations

import pytest
from tests.dist.launch import on_ranks
from tests.transforms import split_ranks

pytest.importorskip("transformers")


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_a_tensor_gang_make_the_loss_of_whole_logits(ranks: int) -> None:
    on_ranks(ranks, split_ranks.main)
