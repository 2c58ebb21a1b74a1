"""`examples/sst2.py` as a user runs it: a process of its own, on the real data beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.dist.launch import run_script

for package in ("transformers", "tokenizers"):
    pytest.importorskip(package)


def run(root: Path, data: Path, folder: Path, *flags: str, seconds: int, expect: int = 0) -> str:
    words = ("--data", data / "sst2", "--output_dir", folder, *flags)
    return run_script(
        root / "examples" / "sst2.py", *words, cwd=folder.parent, timeout=seconds, expect=expect
    )


def test_a_few_steps(root: Path, shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = "--max_steps 6 --eval_strategy steps --eval_steps 3 --save_strategy steps --save_steps 3 --vocab_size 600"
    said = run(root, shared_data, folder, *flags.split(), "--logging_steps", "2", seconds=200)
    results = json.loads((folder / "eval_results.json").read_text())
    assert 0.4 < results["eval_accuracy"] < 0.7  # six updates teach nothing yet
    assert f"dev accuracy {results['eval_accuracy']:.4f}" in said
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "log"][:3] == [2, 4, 6]
    assert (folder / "model.safetensors").is_file()
    assert (folder / "tokenizer.json").is_file()


def test_a_missing_folder_is_said(root: Path, tmp_path: Path) -> None:
    said = run(root, tmp_path, tmp_path / "run", seconds=100, expect=1)
    assert str(tmp_path / "sst2" / "train.tsv") in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_full_length_learns(root: Path, shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(root, shared_data, folder, seconds=800)
    assert json.loads((folder / "eval_results.json").read_text())["eval_accuracy"] > 0.75
