"""Preferences by a recipe: on the model that fine-tuning left, and rows that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.finetuning import small
from tests.finetuning.preferences import pairs

from windlass.cli.main import main

pytest.importorskip("transformers")
SHORT = ["training.use_cpu=true", "training.bf16=false", "training.max_steps=2", "training.report_to=none"]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ran(recipe: str, folder: Path, *words: str) -> int:
    """The exit code of `windlass train`, with two updates."""
    path = folder / f"{recipe}.yaml"
    path.write_text(f"task: {recipe}\n")
    return main(["train", str(path), *SHORT, f"training.output_dir={folder / recipe}", *words])


@pytest.mark.parametrize("recipe", ["dpo", "reward"])
def test_the_model_that_fine_tuning_left_learns_preferences(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tuning = written(tmp_path / "rows.jsonl", small.prompts(24))
    assert ran("sft", tmp_path, f"model.name={small.saved(tmp_path / 'model')}", f"data.train={tuning}") == 0
    left = max((tmp_path / "sft").glob("checkpoint-*"))
    preferences = written(tmp_path / "prefs.jsonl", pairs(24))
    assert ran(recipe, tmp_path, f"model.name={left}", f"data.train={preferences}") == 0
    lines = [json.loads(line) for line in (tmp_path / recipe / "metrics.jsonl").read_text().splitlines()]
    named = {name for line in lines for name in line}
    assert {"dpo": "rewards/accuracies", "reward": "accuracy"}[recipe] in named


def test_a_row_without_a_rejected_answer_is_named_by_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = pairs(24)
    del rows[6]["rejected"]
    preferences = written(tmp_path / "prefs.jsonl", rows)
    model = small.saved(tmp_path / "model")
    assert ran("dpo", tmp_path, f"model.name={model}", f"data.train={preferences}") != 0
    assert "prefs.jsonl:7: column 'rejected' is missing or null" in capsys.readouterr().err


def test_rows_without_any_answer_are_refused_before_a_base_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": row["prompt"], "good": row["chosen"]} for row in pairs(24)]
    preferences = written(tmp_path / "prefs.jsonl", rows)
    assert ran("dpo", tmp_path, f"data.train={preferences}", "model.name=null") != 0
    said = capsys.readouterr().err
    assert "no row has a chosen answer or a completion; its columns: good, question" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("recipe", "named"), [("dpo", "precompute_ref_log_probs=False"), ("kto", "loss_type='kto'")]
)
def test_what_a_pipeline_cannot_compute_is_refused_before_a_base_is_trained(
    recipe: str,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    words = ["--tiny", "parallel.pp=2", f"training.output_dir={tmp_path / 'run'}"]
    assert main(["train", recipe, *words]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "training a small base" not in said


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("dpo", {"rejected": None}, "column 'rejected' is missing or null"),
    (
        "reward",
        {"rejected": "one", "chosen": "one"},
        "are equal, so the row states no preference; remove such rows, as by dataset.filter(",
    ),
    (
        "kto",
        {"prompt": [{"role": "user", "content": "one"}]},
        "must both be text, or both be lists of messages",
    ),
    ("dpo", {"prompt": "one two " * 40}, "the model has 32 positions"),
    ("reward", {"prompt": "one two " * 40}, "the model has 32 positions"),
    ("kto", {"prompt": "one two " * 40}, "the model has 32 positions"),
]


@pytest.mark.parametrize(("recipe", "changed", "message"), BAD)
def test_bad_rows_are_named_by_file_and_line_before_a_base_is_trained_for_them(
    tmp_path: Path,
    recipe: str,
    changed: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = pairs(24)
    rows[6] = {**rows[6], **changed}
    preferences = written(tmp_path / "prefs.jsonl", rows)
    base = ["base.config.max_position_embeddings=32", "base.block_size=32", "base.max_steps=1"]
    words = [f"data.train={preferences}", "data.eval_fraction=0", "tokenizer.train.vocab_size=280", *base]
    assert ran(recipe, tmp_path, *words) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "prefs.jsonl:7: " in shown
    assert message in shown
    assert not (tmp_path / recipe / "base").exists()
