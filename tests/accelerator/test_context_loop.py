"""A loop of the user's own trains on divided sequences as on one process; loaders give all ranks the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.accelerator import context_loop
from tests.dist.launch import on_ranks

pytest.importorskip("transformers")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parallel", "strategy"),
    [
        ({"cp_size": 2}, "sharded"),
        pytest.param({"sp_size": 2}, "replicated", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, "replicated", marks=pytest.mark.slow),
    ],
)
def test_a_loop_on_two_ranks_equals_one_process(parallel: dict[str, int], strategy: str) -> None:
    for found, expected in figures(parallel, strategy, "no"):
        for what, values in expected.items():
            assert np.abs(np.array(found[what]) - np.array(values)).max() <= 1e-10, what


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_loop_in_mixed_precision_is_divided_too(precision: str) -> None:
    """What a layout compares before the start is computed in the precision of the weights. Losses and norms are equal
    up to rounding.
    """
    for found, expected in figures({"sp_size": 2}, "replicated", precision):
        assert found["reported"] == pytest.approx(expected["reported"], rel=0.02)


def figures(parallel: dict[str, int], strategy: str, precision: str) -> Iterator[Any]:
    """What each of two ranks and what one process comes to."""
    [expected] = on_ranks(1, context_loop.train, {}, False, precision)
    for found in on_ranks(2, context_loop.train, parallel, strategy == "sharded", precision):
        yield found, expected
