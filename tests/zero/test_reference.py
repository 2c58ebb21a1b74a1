"""A frozen model beside the trained one, in a loop of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.zero.needed import needs_deepspeed
from tests.zero.reference_ranks import loop

TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks(0, loop, "-1", tmp_path_factory.mktemp("alone"))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("word", "divided"),
    [("2", [False, False]), ("3", [True, True]), ("2+3", [False, True])],
)
def test_a_reference_model_beside_the_trained_one(
    word: str, divided: list[bool], alone: dict[str, Any], tmp_path: Path
) -> None:
    found, _ = on_ranks(2, loop, word, tmp_path)
    assert found["divided"] == divided, "at stage 3 each rank has a part"
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    for weights, expected in zip(found["weights"], alone["weights"], strict=True):
        assert weights.keys() == expected.keys()
        for name, values in weights.items():
            assert values == pytest.approx(expected[name], abs=TOLERANCE), name
