"""Adapters of peft under ZeRO: they train as in one process, and are saved alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.small import llama, text_rows
from tests.zero.adapter_runs import main

from windlass.core.optional import is_available

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
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, on_ranks(0, main, folder, *(f"{kind}:{kind}:-1:6" for kind in KINDS))[0]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("lora", 1), ("lora", 2), ("lora", 3), *((kind, 3) for kind in KINDS[1:]), ("prompt", 1)],
)
def test_an_adapter_trains_as_in_one_process_and_is_continued(
    kind: str, stage: int, alone: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    run, (folder, losses) = f"{kind}:{stage}", alone
    ranks = on_ranks(2, main, tmp_path, f"run:{run}:6", f"stopped:{run}:3", f"stopped:{run}:6:resume")
    assert ranks[0]["run"] == pytest.approx(losses[kind], abs=TOLERANCE)
    found, expected = weights(tmp_path / "run", kind), weights(folder / kind, kind)
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


def test_a_saved_adapter_is_loaded_by_peft(tmp_path: Path) -> None:
    import peft

    ranks = on_ranks(2, main, tmp_path, "run:lora:3:3")
    model = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "run" / "checkpoint-3")).eval()
    batch = {name: torch.stack([row[name] for row in text_rows(5)]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        loss = float(model(**batch).loss)
    assert loss == pytest.approx(ranks[0]["run"][-1], abs=TOLERANCE)


def test_an_adapter_is_continued_by_one_process(
    alone: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    on_ranks(2, main, tmp_path, "run:lora:3:3")
    on_ranks(0, main, tmp_path, "run:lora:-1:6:resume")
    for name, value in weights(alone[0] / "lora").items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, rtol=0, atol=TOLERANCE)
