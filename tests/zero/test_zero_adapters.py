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
        reason="needs DeepSpeed and peft: pip install 'windlass-trainer[deepspeed,peft]'",
    ),
]


# Of prompts from an encoder with layers, whole weights are saved.
KINDS = ("lora", "prompt", "prefix", "ia3", "ptuning")


def weights(folder: Path, kind: str = "lora") -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / ("model.safetensors" if kind == "ptuning" else "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_script(SCRIPT, folder, *(f"{kind}:{kind}:-1:6" for kind in KINDS))
    return folder


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("lora", 1), ("lora", 2), ("lora", 3), *((kind, 3) for kind in KINDS[1:]), ("prompt", 1)],
)
def test_an_adapter_trains_as_in_one_process_and_is_continued(
    kind: str, stage: int, alone: Path, tmp_path: Path
) -> None:
    run = f"{kind}:{stage}"
    launch(2, SCRIPT, tmp_path, f"run:{run}:6", f"stopped:{run}:3", f"stopped:{run}:6:resume")
    losses, expected = (
        json.loads(file.read_text()) for file in (tmp_path / "run.json", alone / f"{kind}.json")
    )
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    found, expected = weights(tmp_path / "run", kind), weights(alone / kind, kind)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE)
    again = weights(tmp_path / "stopped", kind)
    assert all(torch.equal(again[name], value) for name, value in found.items())
    if kind == "ptuning":
        return
    again = weights(tmp_path / "stopped" / "checkpoint-6")
    assert all(torch.equal(again[name], value) for name, value in found.items())
    assert not (tmp_path / "run" / "model.safetensors").exists(), "the base is not written"


def test_a_saved_adapter_is_loaded_by_peft(alone: Path, tmp_path: Path) -> None:
    import peft

    launch(2, SCRIPT, tmp_path, "run:lora:3:3")
    model = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "run" / "checkpoint-3")).eval()
    batch = {name: torch.stack([row[name] for row in text_rows(5)]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        loss = float(model(**batch).loss)
    assert loss == pytest.approx(json.loads((tmp_path / "run.json").read_text())[-1], abs=TOLERANCE)


def test_an_adapter_is_continued_by_one_process(alone: Path, tmp_path: Path) -> None:
    launch(2, SCRIPT, tmp_path, "run:lora:3:3")
    run_script(SCRIPT, tmp_path, "run:lora:-1:6:resume")
    for name, value in weights(alone / "lora").items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, rtol=0, atol=TOLERANCE)
