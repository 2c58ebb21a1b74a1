"""Updates inside the backward on two ranks: gradients are reduced first, and every rank has the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch
from tests.engine.fused_cases import Tied, run
from tests.engine.fused_ranks import RUNS, WAYS

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fused")
    launch(2, Path(__file__).parent / "fused_ranks.py", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_are_one_process(tmp_path: Path, ranks: list[dict[str, Any]], way: str, name: str) -> None:
    optim, changes = RUNS[name]
    steps = {"max_steps": 4} if "gradient_accumulation_steps" in changes else {}
    alone, seen = run(tmp_path, optim, model=Tied(dropout=0.0), **changes, **steps)
    expected = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
    for said in ranks:
        found = said["runs"][f"{way} {name}"]
        torch.testing.assert_close(
            torch.tensor(found["weights"], dtype=torch.float64), expected, rtol=0, atol=1e-11
        )
        assert found["norms"] == pytest.approx(seen.norms, rel=1e-6)


def test_a_stopped_run_ends_with_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        assert said["resumed"] == {name: [True] for name in said["resumed"]}
        assert len(said["resumed"]) == 4


def test_a_parameter_that_one_rank_does_not_reach_is_named_on_all(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        assert "blocks.1.mlp.0.weight" in said["refused"]["unequal"]


def test_options_of_buckets_are_refused(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        assert "ddp_bucket_cap_mb=1" in said["refused"]["buckets"]


def test_a_loop_with_lomo_is_one_with_sgd(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        ours, theirs = said["loops"]
        assert ours == pytest.approx(theirs, abs=1e-12)
    assert ranks[0]["loops"] == ranks[1]["loops"]
