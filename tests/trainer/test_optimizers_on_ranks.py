"""Each optimizer on two ranks, replicated and sharded: the same run, continued to the bit, or refused at its start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.trainer.optimizer_cases import FAMILIES

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    for package in ("bitsandbytes", "torchao"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("optimizers")
    launch(2, Path(__file__).parent / "optimizer_ranks.py", folder)
    return json.loads((folder / "made.json").read_text())


def test_runs_continue_to_the_bit(made: dict[str, Any]) -> None:
    assert len(made["resumed"]) > len(FAMILIES)
    assert [name for name, same in made["resumed"].items() if not same] == []


def test_a_sharded_run_is_the_replicated_one(made: dict[str, Any]) -> None:
    far = {name: gap for name, gap in made["near"].items() if gap > 1e-4}
    # Signs of gradients near 0 and blocks of other sizes differ.
    assert far.keys() <= {"adamw_torch_8bit", "adamw_torch_4bit", "muon", "lion_32bit"}, made["near"]
    assert max(made["near"].values()) < 0.1


def test_what_cannot_be_done_is_refused_at_the_start(made: dict[str, Any]) -> None:
    assert (
        "bitsandbytes cannot update sharded parameters: use adamw_torch_8bit" in made["refused"]["adamw_8bit"]
    )
    assert "ranks that hold the same weights would round them differently" in made["refused"]["rounding"]
