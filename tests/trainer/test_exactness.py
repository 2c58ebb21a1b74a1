"""One update is one mean: the same whatever the split into micro-batches and ranks, and whichever code divides."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.exactness_cases import (
    EPOCHS,
    KINDS,
    SPLITS,
    TRAIN,
    UNEVEN,
    UNEVEN_SPLIT,
    train,
    train_by_hand,
)

from windlass import ModelError

TOLERANCE = 1e-12  # of float64 sums in another order


WORLDS = [*((world, "replicated") for world in sorted(SPLITS)), (2, "sharded")]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]} ranks, {world[1]}")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank of one world came to: kind -> split -> outcome."""
    folder = tmp_path_factory.mktemp("exact")
    world, strategy = request.param
    return on_ranks(world, main, folder, world, strategy)


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


# --- what each rank runs ----------------------------------------------------------------------------------------------


STRATEGIES = {
    "replicated": {},
    "sharded": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 150}},
}
# A sharded model cannot keep gradients of auxiliary terms separately.
REFUSED = ("sharded", "weighted terms with parts")


def main(folder: Path, world: int, strategy: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    run = functools.partial(train, place=folder / "run", epochs=EPOCHS[world], **STRATEGIES[strategy])
    outcomes = {
        name: {
            f"{micro} x {accumulation}": run(kind, micro=micro, accumulation=accumulation)
            for micro, accumulation in SPLITS[world]
            if accumulation == 1 or (strategy, name) != REFUSED
        }
        for name, kind in KINDS.items()
    }
    if world == 2:
        for name, kind in KINDS.items():
            if (strategy, name) != REFUSED:
                outcomes[name][UNEVEN_SPLIT] = run(kind, micro=2, accumulation=3, rows=UNEVEN)
    if strategy == REFUSED[0]:
        with pytest.raises(ModelError, match="needs separate gradients"):
            run(KINDS[REFUSED[1]], micro=2, accumulation=3)
    return outcomes
