"""Replicated data parallelism, in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch


@pytest.mark.dist
def test_compression_and_unused_parameters() -> None:
    said = launch(2, Path(__file__).with_name("ddp_ranks.py"))
    assert said.count("replicas are right") == 2
