"""Each optimizer on two ranks, replicated and sharded: the same run, continued to the bit, or refused at its start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch

pytestmark = pytest.mark.dist


# All of them take minutes. These have states of other shapes than their parameters, or two modes.
SOME = ["adafactor", "schedule_free_adamw", "adamw_torch_8bit"]


@pytest.fixture(scope="module", params=[SOME, pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for package in ("bitsandbytes", "torchao"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("optimizers")
    launch(2, Path(__file__).parent / "optimizer_ranks.py", folder, *request.param)
    return json.loads((folder / "made.json").read_text())


def test_runs_continue_to_the_bit(made: dict[str, Any]) -> None:
    assert len(made["resumed"]) >= len(SOME)
    assert [name for name, same in made["resumed"].items() if not same] == []


def test_a_sharded_run_is_the_replicated_one(made: dict[str, Any]) -> None:
    far = {name: gap for name, gap in made["near"].items() if gap > 1e-4}
    # Signs of gradients near 0, products in bf16, averages in blocks of another place, and directions of a basis in
    # which the gradient has no part differ.
    assert far.keys() <= {
        "adamw_torch_8bit", "adamw_torch_4bit", "galore_adamw_8bit", "muon", "lion_32bit",
    }, made["near"]  # fmt: skip
    assert all(gap < 0.1 for gap in made["near"].values())


def test_what_cannot_be_done_is_refused_at_the_start(made: dict[str, Any]) -> None:
    assert "bitsandbytes cannot update sharded parameters: use adamw_torch_8bit" in made["refused"]["8bit"]
    assert "ranks that hold the same weights would round them differently" in made["refused"]["rounding"]
