"""How ranks that work together learn that one of them failed (real ranks: tests/engine/evaluate_ranks.py)."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.dist.gang import Gang
from windlass.metrics.gather import PeerError, agree, telling_others


def test_an_error_stays_what_it_is() -> None:
    with pytest.raises(ArithmeticError, match="mine"), telling_others(Gang()):
        raise ArithmeticError("mine")


def test_agreement_quotes_the_rank_that_failed() -> None:
    class Failed(Gang):
        def gather_objects(self, value: Any) -> list[Any]:
            return [value, {"failed": "OSError: disk"}]

    with pytest.raises(PeerError, match="rank 1: OSError: disk"):
        agree(Failed(), {})
