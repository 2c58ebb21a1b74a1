"""Times and sizes as text, and the sizes of files as accelerate reads them."""

from __future__ import annotations

import math

import pytest
from accelerate.utils import modeling as reference

from windlass.config.kinds import convert_file_size_to_int, seconds, size_in_bytes
from windlass.core.errors import ConfigError


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


@pytest.mark.parametrize("size", [0, 5, "1GiB", "2MiB", "3KiB", "1.5GB", "10MB", "7KB", "8Gb", "1e3KB"])
def test_sizes_of_weight_files_are_those_of_the_reference(size: int | str) -> None:
    assert convert_file_size_to_int(size) == reference.convert_file_size_to_int(size)


@pytest.mark.parametrize("size", ["", "5", "GB", "-1GB", "1.2.3MB", ".GB", "5 cows", -1])
def test_what_is_not_the_size_of_a_file(size: int | str) -> None:
    with pytest.raises(ConfigError, match="5GB"):
        convert_file_size_to_int(size)
