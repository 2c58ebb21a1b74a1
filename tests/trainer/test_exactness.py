"""One update is one mean: the same whatever the split into micro-batches and ranks, and whoever divides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.launch import launch
from tests.trainer.exactness_cases import EPOCHS, KINDS, SPLITS, TRAIN, UNEVEN, UNEVEN_SPLIT, train_by_hand

HERE = Path(__file__).parent
TOLERANCE = 1e-12  # of float64 sums in another order


WORLDS = [*((world, "replicated") for world in sorted(SPLITS)), (2, "sharded")]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]} ranks, {world[1]}")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank of one world came to: kind -> split -> outcome."""
    folder = tmp_path_factory.mktemp("exact")
    world, strategy = request.param
    launch(world, HERE / "exactness_ranks.py", folder, strategy)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.dist
@pytest.mark.parametrize("name", KINDS)
def test_every_split_equals_the_loop_written_by_hand(name: str, outcomes: list[dict[str, Any]]) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        epochs = EPOCHS[len(outcomes)]
        by_hand = {len(rows): train_by_hand(KINDS[name], rows, epochs) for rows in (TRAIN, UNEVEN)}
    finally:
        torch.set_default_dtype(default)
    for outcome in outcomes:
        for split, run in outcome[name].items():
            expected = by_hand[len(UNEVEN if split == UNEVEN_SPLIT else TRAIN)]
            for what, values in expected.items():
                difference = np.abs(np.array(run[what]) - np.array(values)).max()
                assert difference <= TOLERANCE, f"{name}, {split}, {what}: off by {difference}"


@pytest.mark.dist
def test_ranks_hold_the_same_bits(outcomes: list[dict[str, Any]]) -> None:
    for other in outcomes[1:]:
        assert other == outcomes[0]
