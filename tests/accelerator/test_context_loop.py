"""A loop of the user's own trains on divided sequences as on one process; loaders give all ranks the same batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    for found, expected in figures(tmp_path, parallel, strategy, "no"):
        for what, values in expected.items():
            assert np.abs(np.array(found[what]) - np.array(values)).max() <= 1e-10, what


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_loop_in_mixed_precision_is_divided_too(precision: str, tmp_path: Path) -> None:
    """What a layout compares before the start is computed in the precision of the weights. Losses and norms are equal
    up to rounding.
    """
    for found, expected in figures(tmp_path, {"sp_size": 2}, "replicated", precision):
        assert found["reported"] == pytest.approx(expected["reported"], rel=0.02)


def figures(folder: Path, parallel: dict[str, int], strategy: str, precision: str) -> Iterator[Any]:
    """What each of two ranks and what one process comes to."""
    launch(1, LOOP, folder, "{}", "replicated", precision)
    expected = json.loads((folder / "rank0.json").read_text())
    launch(2, LOOP, folder, json.dumps(parallel), strategy, precision)
    for rank in range(2):
        yield json.loads((folder / f"rank{rank}.json").read_text()), expected
