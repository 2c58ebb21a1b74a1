"""Loops of the user's own under DeepSpeed's engine, with a plugin's fields and with a configuration's placeholders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch, run_script
from tests.zero import loop_ranks
from tests.zero.needed import needs_deepspeed

from windlass import Accelerator
from windlass.core.errors import ConfigError
from windlass.utils import DeepSpeedPlugin

SCRIPT = Path(loop_ranks.__file__)
TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    run_script(SCRIPT, folder, "-1")
    return json.loads((folder / "found.json").read_text())["-1"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["1", "2", "3", "file"])
def test_a_loop_equals_one_process(kind: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """Accumulation with a shorter last update, clipping, a schedule; a loaded state continues to the same bits."""
    launch(2, SCRIPT, tmp_path, kind)
    found = json.loads((tmp_path / "found.json").read_text())[kind]
    assert found["type"] == "DEEPSPEED"
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert found["weights"].keys() == alone["weights"].keys()
    for name, values in found["weights"].items():
        assert values == pytest.approx(alone["weights"][name], abs=TOLERANCE), name


def test_a_schedule_beside_that_of_the_configuration_is_refused() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=loop_ranks.FILE))
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match=r"scheduler.type='WarmupLR': contradicts ConstantLR of the script"):
        accelerator.prepare(schedule)
    with pytest.raises(ConfigError, match=r"optimizer.type='AdamW': contradicts SGD of the script"):
        accelerator.prepare(optimizer)
