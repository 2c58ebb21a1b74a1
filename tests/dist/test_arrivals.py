from __future__ import annotations

from typing import Any

import pytest

from windlass.dist.arrivals import Arrival

CONTENT = {"machine": "a", "host": "b", "address": "c", "rank": 0, "machines": 2, "round": 1}


@pytest.mark.parametrize("rank", [0, 7, None])
def test_an_arrival_is_read(rank: int | None) -> None:
    assert Arrival.read(3, {**CONTENT, "rank": rank}) == Arrival(3, "a", "b", "c", rank, 2, 1)


@pytest.mark.parametrize(
    "change",
    [{"rank": rank} for rank in ("", [], {}, 0.0, False, "1", -1)]
    + [{"machines": None}, {"round": -1}, {"host": "h" * 201}, {"machine": 1}],
    ids=str,
)
def test_what_is_no_arrival_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no name|no number"):
        Arrival.read(1, {**CONTENT, **change})
