"""Replicated data parallelism, in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch


@pytest.mark.dist
def test_compression_and_unused_parameters() -> None:
    said = launch(2, Path(__file__).with_name("ddp_ranks.py"))
    assert said.count("replicas are right") == 2


@pytest.mark.dist
def test_a_wrapper_made_in_the_middle_of_a_run_sums_to_the_same_bits() -> None:
    """As that of a loop of the user's own, which is resumed and has no batch before its first."""
    said = launch(3, Path(__file__).with_name("buckets_ranks.py"))
    assert said.count("resumed to the bit") == 3
