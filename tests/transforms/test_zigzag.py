"""Parts of rows: each token is in one of them, and they are joined to the same rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import ConfigError
from windlass.transforms.zigzag import Zigzag


@given(size=st.integers(1, 6), chunk=st.integers(1, 5), rows=st.integers(1, 3))
def test_parts_are_joined_to_the_rows(size: int, chunk: int, rows: int) -> None:
    division = Zigzag(size, 2 * size * chunk)
    whole = torch.arange(rows * division.length).reshape(rows, -1)
    parts = torch.cat([division.part(whole, rank) for rank in range(size)], 1)
    assert torch.equal(division.whole(parts, 1), whole)
    assert torch.equal(division.parts(whole, 1), parts)


@given(size=st.integers(1, 6), chunk=st.integers(1, 5))
def test_ranks_have_equally_many_pairs_to_compute(size: int, chunk: int) -> None:
    division = Zigzag(size, 2 * size * chunk)
    pairs = [
        sum(place + 1 for places in division.stretches(rank) for place in places) for rank in range(size)
    ]
    assert len(set(pairs)) == 1


def test_a_length_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        Zigzag(2, 10)
