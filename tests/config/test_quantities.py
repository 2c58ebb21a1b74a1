from __future__ import annotations

import math

import pytest

from windlass.config.quantities import seconds, size_in_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5min", 300),
        ("90s", 90),
        ("1.5h", 5400),
        (" 2 hours ", 7200),
        ("10 MIN", 600),
        (30, 30),
        (0.5, 0.5),
        ("1d", 86400),
    ],
)
def test_times(text: str | float, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("8GB", 8 * 10**9), ("512MiB", 2**29), (1024, 1024), ("1.5 kb", 1500)]
)
def test_sizes(text: str | float, value: int) -> None:
    assert size_in_bytes(text) == value


@pytest.mark.parametrize(
    "wrong",
    ["", "5", "min", "5 parsecs", "-5min", 0, -1, math.nan, math.inf, "0s", "1e3s", "500ms", "2hs", "1bs"],
)
def test_what_is_neither_is_refused(wrong: str | float) -> None:
    with pytest.raises(ValueError, match="must be a time above 0"):
        seconds(wrong)
    with pytest.raises(ValueError, match="must be a size above 0"):
        size_in_bytes(wrong)
