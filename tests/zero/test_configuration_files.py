"""Configuration files of other libraries' documentation load and train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.config.test_deepspeed import DOCUMENTED
from tests.dist.launch import on_ranks
from tests.zero.file_runs import main
from tests.zero.needed import needs_deepspeed

TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


def zero(**section: Any) -> dict[str, Any]:
    return {**DOCUMENTED, "zero_optimization": section}


FILES = {
    "alone": zero(stage=1),
    "documented": DOCUMENTED,
    "offloaded": zero(
        stage=2, offload_optimizer={"device": "cpu"}, overlap_comm=True, round_robin_gradients=True
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for name, config in FILES.items():
        (made / f"{name}-config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return on_ranks(1, main, folder / "alone", str(folder / "alone-config.json"))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "init"), [("documented", False), ("offloaded", False), ("documented", True)]
)
def test_a_file_trains_as_one_process_does(
    name: str, init: bool, alone: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    found, _ = on_ranks(2, main, tmp_path, str(folder / f"{name}-config.json"), init)
    for key, values in alone.items():
        assert found[key] == pytest.approx(values, abs=TOLERANCE), key
    rates = found["learning_rate"]
    assert rates[0] == 0, "WarmupDecayLR begins at the least rate"
    assert rates[3] > rates[-1] > 0
    weights, expected = (load_file(one / "model.safetensors") for one in (tmp_path, folder / "alone"))
    for tensor, value in expected.items():
        assert weights[tensor].flatten().tolist() == pytest.approx(value.flatten().tolist(), abs=TOLERANCE)
