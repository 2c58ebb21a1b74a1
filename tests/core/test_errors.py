from __future__ import annotations

import pytest

from windlass.core.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (OSError(2, "gone"), "[Errno 2] gone"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line
