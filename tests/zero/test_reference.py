"""A frozen model beside the trained one, in a loop of the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch, run_script
from tests.zero import reference_ranks
from tests.zero.needed import needs_deepspeed

SCRIPT = Path(reference_ranks.__file__)
TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    run_script(SCRIPT, folder, "-1")
    return found_in(folder)["-1"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("word", "divided"),
    [("2", [False, False]), ("3", [True, True]), ("2+3", [False, True])],
)
def test_a_reference_model_beside_the_trained_one(
    word: str, divided: list[bool], alone: dict[str, Any], tmp_path: Path
) -> None:
    launch(2, SCRIPT, tmp_path, word)
    found = found_in(tmp_path)[word]
    assert found["divided"] == divided, "at stage 3 each rank has a part"
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    for weights, expected in zip(found["weights"], alone["weights"], strict=True):
        assert weights.keys() == expected.keys()
        for name, values in weights.items():
            assert values == pytest.approx(expected[name], abs=TOLERANCE), name
