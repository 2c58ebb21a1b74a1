"""Fine-tuning on several ranks: the same losses, norms and figures as in one process, replicated and sharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.dist.launch import launch
from tests.finetuning.sft_ranks import CASES, WAYS, figures

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.mark.dist
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    launch(2, Path(__file__).parent / "sft_ranks.py", tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    for name, case in CASES.items():
        alone = figures(tmp_path / name / "alone", **case)
        for way in WAYS:
            for ours, theirs in zip(found[f"{name} {way}"], alone, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-5), (name, way)
        written = {path.name for path in (tmp_path / name / "sharded").iterdir()}
        assert ("adapter_model.safetensors" in written) == case["lora"]
