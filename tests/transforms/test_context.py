"""Decoders of transformers on divided sequences compute what one process computes; others are refused."""

from __future__ import annotations

import pytest
from tests.dist.launch import on_ranks
from tests.transforms import context_ranks, single_parts

pytest.importorskip("transformers")


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_as_one_process_does(ranks: int) -> None:
    on_ranks(ranks, context_ranks.main)


@pytest.mark.slow
@pytest.mark.dist
def test_what_differs_by_more_is_what_the_model_computes_in_single_precision() -> None:
    on_ranks(2, single_parts.main)
