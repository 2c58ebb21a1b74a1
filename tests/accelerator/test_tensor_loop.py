"""A loop of the user's own trains replicas of divided layers as one process does, in whichever form it is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.dist.launch import launch

pytest.importorskip("transformers")
LOOP = Path(__file__).with_name("tensor_loop.py")
FORMS = ("accumulated", "each", "twice", "held", "bare", "recomputed", "unfrozen")


def check(folder: Path, layout: dict[str, object], *cases: str) -> None:
    launch(1, LOOP, folder, "{}", *cases)
    expected = json.loads((folder / "rank0.json").read_text())
    launch(4, LOOP, folder, json.dumps(layout), *cases)
    for rank in range(4):
        found = json.loads((folder / f"rank{rank}.json").read_text())
        for case in cases:
            for what, values in expected[case].items():
                difference = np.abs(np.array(found[case][what]) - np.array(values)).max()
                assert difference <= 1e-10, (rank, case, what, difference)


@pytest.mark.dist
def test_replicas_of_divided_layers(tmp_path: Path) -> None:
    check(tmp_path, {"tp_size": 2, "dp_replicate_size": 2}, "qwen3/accumulated", "qwen3/each", "qwen3/twice")


@pytest.mark.dist
def test_sharded_divided_layers(tmp_path: Path) -> None:
    check(tmp_path, {"tp_size": 2, "dp_shard_size": 2, "sharded": True}, "qwen3/accumulated", "qwen3/twice")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "even", "qwen3"])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_form_of_a_loop(name: str, sharded: bool, tmp_path: Path) -> None:
    layout: dict[str, object] = {"tp_size": 2, "dp_replicate_size": 2}
    if sharded:
        layout = {"tp_size": 2, "dp_shard_size": 2, "sharded": True}
    check(tmp_path, layout, *(f"{name}/{form}" for form in FORMS))
