"""Configuration files of other libraries' documentation load and train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.config.test_deepspeed import DOCUMENTED
from tests.dist.launch import launch
from tests.zero import file_runs
from tests.zero.needed import needs_deepspeed

SCRIPT = Path(file_runs.__file__)
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
    launch(1, SCRIPT, made, "alone", made / "alone-config.json")
    return made


@pytest.mark.parametrize(("name", "init"), [("documented", ()), ("offloaded", ()), ("documented", ("init",))])
def test_a_file_trains_as_one_process_does(name: str, init: tuple[str, ...], folder: Path) -> None:
    run = f"{name}{''.join(init)}"
    launch(2, SCRIPT, folder, run, folder / f"{name}-config.json", *init)
    found, alone = (json.loads((folder / f"{one}.json").read_text()) for one in (run, "alone"))
    for key, values in alone.items():
        assert found[key] == pytest.approx(values, abs=TOLERANCE), key
    rates = found["learning_rate"]
    assert rates[0] == 0, "WarmupDecayLR begins at the least rate"
    assert rates[3] > rates[-1] > 0
    weights, expected = (load_file(folder / one / "model.safetensors") for one in (run, "alone"))
    for tensor, value in expected.items():
        assert weights[tensor].flatten().tolist() == pytest.approx(value.flatten().tolist(), abs=TOLERANCE)
