"""Sharded models: several processes against one, and the model of one process alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch
from tests.transforms.fsdp_ranks import BLOCKS, CPU, carried_state, compare, low_precision

from windlass.config.plan import ShardPlan
from windlass.dist.gang import Gang, leave

RANKS = Path(__file__).with_name("fsdp_ranks.py")


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
def test_sharded_training_is_that_of_one_process(world: int, tmp_path: Path) -> None:
    launch(world, RANKS, tmp_path, timeout=400)


def test_a_world_of_one(tmp_path: Path) -> None:
    gang = Gang()
    try:
        compare(gang, ShardPlan(**BLOCKS), 3, 2)
        compare(gang, ShardPlan(cpu_offload=True, recompute=True, ignored="blocks.0", **BLOCKS), 3, 2)
        carried_state(gang, tmp_path)
        low_precision(gang)
    finally:
        leave()
    assert not torch.distributed.is_initialized()
    assert CPU.type == "cpu"
