"""Activations recomputed under DeepSpeed, by the Trainer and by DeepSpeed's own function; layers of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import launch, run_script
from tests.zero import recomputed_runs
from tests.zero.needed import needs_deepspeed
from tests.zero.test_zero_checkpoints import digest

SCRIPT = Path(recomputed_runs.__file__)
TOLERANCE = 5e-6  # of fp32

pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_deepspeed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process without DeepSpeed."""
    made = tmp_path_factory.mktemp("recomputed")
    run_script(SCRIPT, made, "blocks:blocks:-1:6", "own:own:-1:6", "experts:experts:-1:6")
    return made


def check(folder: Path, name: str, alone: str) -> None:
    found, expected = (json.loads((folder / f"{one}.json").read_text()) for one in (name, alone))
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, abs=TOLERANCE), key
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
def test_a_run_equals_one_process_and_resumes_to_the_same_bits(model: str, stage: int, folder: Path) -> None:
    clean, same = f"clean{model}{stage}", f"same{model}{stage}"
    words = [f"{clean}:{model}:{stage}:6", f"{same}:{model}:{stage}:3", f"{same}:{model}:{stage}:6:resume"]
    launch(2, SCRIPT, folder, *words, timeout=600)
    check(folder, clean, model.partition("-")[0])
    assert digest(folder / clean / "checkpoint-6") == digest(folder / same / "checkpoint-6")


def test_layers_of_experts_equal_one_process(folder: Path) -> None:
    """Ranks choose different experts, so stage 3 gathers a layer's parameters at once (`leaf_module`)."""
    launch(2, SCRIPT, folder, "divided:experts:3:6", timeout=600)
    check(folder, "divided", "experts")
