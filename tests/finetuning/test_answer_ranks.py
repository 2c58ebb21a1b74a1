"""Answers on two ranks, replicated, sharded and drawn: those of one process, in the order of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.finetuning import small

from windlass import SFTTrainer
from windlass.dist.sharded import is_sharded

pytest.importorskip("transformers")

pytestmark = pytest.mark.dist

SHARDED: dict[str, Any] = {
    "fsdp": "full_shard",
    "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
}
DRAWN = {"generation_do_sample": True}
FORMS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": SHARDED,
    "drawn": DRAWN,
}


def test_the_same_answers_as_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(2, main, tmp_path)
    greedy, drawn = story(tmp_path / "alone", 4), story(tmp_path / "drawn alone", 4, **DRAWN)
    assert len({row["answer"] for row in greedy["rows"]}) > 2, "the same text for all shows nothing"
    assert greedy["rows"] != drawn["rows"]
    for form in FORMS:
        alone = drawn if form == "drawn" else greedy
        said = [found[form] for found in ranks]
        assert said[0]["sharded"] == said[1]["sharded"] == (form == "fsdp")
        assert said[0]["metrics"] == said[1]["metrics"] == alone["metrics"]
        assert said[0]["rows"] == alone["rows"]
        assert said[0]["figures"] == pytest.approx(alone["figures"], abs=1e-12), "a repeated batch is counted"


# --- what each rank runs ----------------------------------------------------------------------------------------------


def story(folder: Path, batch: int, **changes: Any) -> dict[str, Any]:
    """5 rows in batches of 2: the second rank has no row in the last round."""
    args = small.arguments(
        folder, per_device_train_batch_size=batch, per_device_eval_batch_size=2, max_steps=2, eval_strategy="steps",
        eval_steps=1, predict_with_generate=True, eval_metrics=["token_f1"], generation_max_new_tokens=6,
        train_sampling_strategy="sequential", learning_rate=0.05, **changes,
    )  # fmt: skip
    trainer = SFTTrainer(
        small.model().double(), args, train_dataset=small.table(small.prompts(16)),
        eval_dataset=small.table(small.prompts(5)), processing_class=small.tokenizer(),
    )  # fmt: skip
    trainer.train()
    path = folder / "answers.jsonl"
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    return {
        "sharded": all(is_sharded(p) for p in trainer.model.parameters()),
        "metrics": [row["eval_token_f1"] for row in evaluations],
        "figures": [
            row[name] for row in evaluations for name in ("eval_mean_token_accuracy", "eval_entropy")
        ],
        "rows": [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [],
    }


def main(folder: Path) -> dict[str, Any]:
    return {form: story(folder / form, 2, **changes) for form, changes in FORMS.items()}
