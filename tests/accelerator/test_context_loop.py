"""A loop of the user's own trains on divided sequences as on one process; loaders give all ranks the same batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.dist.launch import launch

pytest.importorskip("transformers")
LOOP = Path(__file__).with_name("context_loop.py")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parallel", "strategy"),
    [
        ({"cp_size": 2}, "sharded"),
        pytest.param({"sp_size": 2}, "replicated", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, "replicated", marks=pytest.mark.slow),
    ],
)
def test_a_loop_on_two_ranks_equals_one_process(
    parallel: dict[str, int], strategy: str, tmp_path: Path
) -> None:
    launch(1, LOOP, tmp_path, "{}", "replicated")
    expected = json.loads((tmp_path / "rank0.json").read_text())
    launch(2, LOOP, tmp_path, json.dumps(parallel), strategy)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for what, values in expected.items():
            assert np.abs(np.array(found[what]) - np.array(values)).max() <= 1e-10, (rank, what)
