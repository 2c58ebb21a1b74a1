"""Adapters of peft under ZeRO: they train as in one process, and are saved alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch, run_script
from tests.trainer.small import llama, text_rows
from tests.zero import adapter_runs

from windlass.core.optional import is_available

SCRIPT = Path(adapter_runs.__file__)
TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (is_available("deepspeed") and is_available("peft")),
        reason="needs DeepSpeed and peft: pip install 'windlass[deepspeed,peft]'",
    ),
]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_script(SCRIPT, folder, "alone:-1:6")
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_adapter_trains_as_in_one_process_and_is_continued(
    stage: int, alone: Path, tmp_path: Path
) -> None:
    launch(2, SCRIPT, tmp_path, f"run:{stage}:6", f"stopped:{stage}:3", f"stopped:{stage}:6:resume")
    losses, expected = (
        json.loads(file.read_text()) for file in (tmp_path / "run.json", alone / "alone.json")
    )
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    found = weights(tmp_path / "run")
    assert found.keys() == weights(alone / "alone").keys()
    for name, value in weights(alone / "alone").items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE)
    for folder in ("", "checkpoint-6"):
        again = weights(tmp_path / "stopped" / folder)
        assert all(torch.equal(again[name], value) for name, value in found.items())
    assert not (tmp_path / "run" / "model.safetensors").exists(), "the base is not written"


def test_a_saved_adapter_is_loaded_by_peft(alone: Path, tmp_path: Path) -> None:
    import peft

    launch(2, SCRIPT, tmp_path, "run:3:3")
    model = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "run" / "checkpoint-3")).eval()
    batch = {name: torch.stack([row[name] for row in text_rows(5)]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        loss = float(model(**batch).loss)
    assert loss == pytest.approx(json.loads((tmp_path / "run.json").read_text())[-1], abs=TOLERANCE)


def test_an_adapter_is_continued_by_one_process(alone: Path, tmp_path: Path) -> None:
    launch(2, SCRIPT, tmp_path, "run:3:3")
    run_script(SCRIPT, tmp_path, "run:-1:6:resume")
    for name, value in weights(alone / "alone").items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, rtol=0, atol=TOLERANCE)
