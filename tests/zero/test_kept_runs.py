"""What a run does with its checkpoints, under ZeRO: it keeps the best, stops early, rolls back, saves while it trains.

Each run on two ranks is compared with one of a single process without DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.dist.launch import on_ranks
from tests.zero import kept_runs
from tests.zero.needed import needs_deepspeed

Runs = tuple[Path, dict[str, Any]]  # their folders, and what they came to
TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("alone")
    return folder, on_ranks(0, kept_runs.main, folder, *(f"{kind}:-1" for kind in kept_runs.KINDS))[0]


@pytest.fixture(scope="module", params=[1, 3])
def divided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, int]:
    folder, words = (
        tmp_path_factory.mktemp("divided"),
        [f"{kind}:{request.param}" for kind in kept_runs.KINDS],
    )
    return (folder, on_ranks(2, kept_runs.main, folder, *words)[0]), request.param


def compared(kind: str, divided: tuple[Runs, int], alone: Runs) -> dict[str, Any]:
    """What the run under ZeRO came to, once it was found to equal the other one."""
    (folder, runs), stage = divided
    found, expected = runs[f"{kind}{stage}"], alone[1][f"{kind}-1"]
    for key in ("step", "kept"):
        assert found[key] == expected[key], key
    assert [row[:2] for row in found["log"]] == [row[:2] for row in expected["log"]]
    assert [row[2] for row in found["log"]] == pytest.approx(
        [row[2] for row in expected["log"]], abs=TOLERANCE
    )
    assert found["best"][0] == pytest.approx(expected["best"][0], abs=TOLERANCE)
    assert found["best"][1:] == expected["best"][1:]
    ours, theirs = (
        load_file(place / "model.safetensors")
        for place in (folder / f"{kind}{stage}", alone[0] / f"{kind}-1")
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].flatten().tolist() == pytest.approx(value.flatten().tolist(), abs=TOLERANCE), name
    return found  # type: ignore[no-any-return]


def test_the_best_model_is_loaded_and_the_run_stops_early(divided: tuple[Runs, int], alone: Runs) -> None:
    found = compared("best", divided, alone)
    assert found["step"] == 6, "two evaluations after the first were worse"
    assert found["best"][1:] == [2, "checkpoint-2"]
    assert found["kept"] == ["checkpoint-2", "checkpoint-6"]
    (folder, _), stage = divided
    place = folder / f"best{stage}"
    exported = place / "best.safetensors"
    from windlass.cli.main import main

    assert main(["checkpoint", "export", str(place / "checkpoint-2"), str(exported)]) == 0
    saved = load_file(place / "model.safetensors")
    assert all(saved[name].equal(value) for name, value in load_file(exported).items())


def test_a_run_rolls_back(divided: tuple[Runs, int], alone: Runs) -> None:
    found = compared("rollback", divided, alone)
    assert any(key == "rolled_back_to" for _, key, _ in found["log"])


def test_updates_go_on_while_a_checkpoint_is_written(divided: tuple[Runs, int], alone: Runs) -> None:
    found = compared("background", divided, alone)
    assert found["learned"][0] >= 6, "three updates were made while it was written"
