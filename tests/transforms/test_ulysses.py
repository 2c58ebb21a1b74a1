"""Heads that cannot be divided among ranks are refused; what ranks compute is tested with the ring."""

from __future__ import annotations

import pytest

from windlass.core.errors import ConfigError
from windlass.transforms.ulysses import refuse_heads


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 2), (4, 1, 4), (8, 2, 4), (6, 6, 3)])
def test_heads_that_can_be_divided_are_accepted(heads: int, key_heads: int, size: int) -> None:
    refuse_heads(heads, key_heads, size)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "named"),
    [(6, 6, 4, "attention heads, 6"), (12, 3, 4, "key-value heads, 3")],
)
def test_heads_that_cannot_be_divided_are_refused(heads: int, key_heads: int, size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        refuse_heads(heads, key_heads, size)
