"""Decoders of transformers on divided sequences compute what one process computes; others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch

pytest.importorskip("transformers")
RANKS = Path(__file__).with_name("context_ranks.py")


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_as_one_process_does(ranks: int) -> None:
    launch(ranks, RANKS)


@pytest.mark.slow
@pytest.mark.dist
def test_what_differs_by_more_is_what_the_model_computes_in_single_precision() -> None:
    launch(2, RANKS.with_name("single_parts.py"))
