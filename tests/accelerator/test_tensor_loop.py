"""A loop of the user's own trains replicas of divided layers as one process does, in whichever form it is written."""

from __future__ import annotations

import numpy as np
import pytest
from tests.accelerator import tensor_loop
from tests.dist.launch import on_ranks

pytest.importorskip("transformers")
FORMS = ("accumulated", "each", "twice", "held", "bare", "recomputed", "unfrozen")


def check(layout: dict[str, object], *cases: str) -> None:
    [expected] = on_ranks(1, tensor_loop.main, {}, cases)
    for rank, found in enumerate(on_ranks(4, tensor_loop.main, layout, cases)):
        for case in cases:
            for what, values in expected[case].items():
                difference = np.abs(np.array(found[case][what]) - np.array(values)).max()
                assert difference <= 1e-10, (rank, case, what, difference)


@pytest.mark.dist
def test_replicas_of_divided_layers() -> None:
    check({"tp_size": 2, "dp_replicate_size": 2}, "qwen3/accumulated", "qwen3/each", "qwen3/twice")


@pytest.mark.dist
def test_sharded_divided_layers() -> None:
    check({"tp_size": 2, "dp_shard_size": 2, "sharded": True}, "qwen3/accumulated", "qwen3/twice")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "even", "qwen3"])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_form_of_a_loop(name: str, sharded: bool) -> None:
    layout: dict[str, object] = {"tp_size": 2, "dp_replicate_size": 2}
    if sharded:
        layout = {"tp_size": 2, "dp_shard_size": 2, "sharded": True}
    check(layout, *(f"{name}/{form}" for form in FORMS))
