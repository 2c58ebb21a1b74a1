"""Activations recomputed under DeepSpeed, by the Trainer and by DeepSpeed's own function; layers of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import on_ranks
from tests.zero.needed import needs_deepspeed
from tests.zero.recomputed_runs import main
from tests.zero.test_zero_checkpoints import digest

Runs = tuple[Path, dict[str, Any]]  # their folder, and what those of one process came to
TOLERANCE = 5e-6  # of fp32

pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_deepspeed]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of one process without DeepSpeed."""
    folder = tmp_path_factory.mktemp("recomputed")
    return folder, on_ranks(0, main, folder, "blocks:blocks:-1:6", "own:own:-1:6", "experts:experts:-1:6")[0]


def check(found: dict[str, Any], name: str, runs: Runs, alone: str) -> None:
    folder, expected = runs
    for key, values in expected[alone].items():
        assert found[name][key] == pytest.approx(values, abs=TOLERANCE), key
    weights = load_file(folder / name / "model.safetensors")
    for tensor, value in load_file(folder / alone / "model.safetensors").items():
        torch.testing.assert_close(weights[tensor], value, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        *[("blocks", 1), ("blocks", 2), ("blocks", 3), ("own", 2), ("own", 3)],
        *[("own-partitioned", 3), ("own-host", 2), ("own-host", 3), ("own-both", 3), ("own-contiguous", 3)],
    ],
)
def test_a_run_equals_one_process_and_resumes_to_the_same_bits(model: str, stage: int, runs: Runs) -> None:
    clean, same = f"clean{model}{stage}", f"same{model}{stage}"
    words = [f"{clean}:{model}:{stage}:6", f"{same}:{model}:{stage}:3", f"{same}:{model}:{stage}:6:resume"]
    folder = runs[0]
    check(on_ranks(2, main, folder, *words, timeout=600)[0], clean, runs, model.partition("-")[0])
    assert digest(folder / clean / "checkpoint-6") == digest(folder / same / "checkpoint-6")


def test_layers_of_experts_equal_one_process(runs: Runs) -> None:
    """Ranks choose different experts, so stage 3 gathers a layer's parameters at once (`leaf_module`)."""
    check(on_ranks(2, main, runs[0], "divided:experts:3:6", timeout=600)[0], "divided", runs, "experts")
