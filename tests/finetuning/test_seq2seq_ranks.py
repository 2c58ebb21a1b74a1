"""Text that two ranks generate, replicated and sharded: that of one process, in the order of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.finetuning.test_seq2seq_trainer import exact_share
from tests.finetuning.tiny import encoder_decoder, pairs, settings, tokenizer

from windlass import Seq2SeqTrainer, Seq2SeqTrainingArguments
from windlass.dist.sharded import is_sharded

pytest.importorskip("transformers")


pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = on_ranks(2, main, tmp_path_factory.mktemp("seq2seq"))
    assert first == second, "ranks disagree"
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(json.dumps(story(tmp_path_factory.mktemp("alone"), 4)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_the_same_text_as_one_process(form: str, said: dict[str, Any], alone: dict[str, Any]) -> None:
    found = said[form]
    assert found["sharded"] == (form == "fsdp")
    assert len(found["losses"]) == 2
    assert found["losses"] == pytest.approx(alone["losses"], abs=1e-12)
    for name in ("metrics", "predictions", "labels", "bare"):
        assert found[name] == alone[name], name
    assert len({tuple(row) for row in found["predictions"]}) > 3, "the same text for all shows nothing"


# --- what each rank runs ----------------------------------------------------------------------------------------------


EVALUATED = 11
SHARDED: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": "T5Block"}}


def story(folder: Path, batch: int, **changes: Any) -> dict[str, Any]:
    """Evaluate before the first update and after the last, and predict with and without labels."""
    args = Seq2SeqTrainingArguments(
        **settings(
            folder, per_device_train_batch_size=batch, per_device_eval_batch_size=2, max_steps=2, eval_on_start=True,
            eval_strategy="steps", eval_steps=2, generation_max_length=9, generation_num_beams=2,
            train_sampling_strategy="sequential", **changes,
        )
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        encoder_decoder().double(), args, train_dataset=pairs(16), eval_dataset=pairs(EVALUATED, seed=8),
        processing_class=tokenizer(), compute_metrics=exact_share,
    )  # fmt: skip
    trainer.train()
    sharded = all(is_sharded(p) for p in trainer.model.parameters())
    labelled, bare = trainer.predict(pairs(7)), trainer.predict(pairs(3, labelled=False), num_beams=1)
    assert sharded == all(is_sharded(p) for p in trainer.model.parameters())
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    return {
        "sharded": sharded,
        "losses": [row["eval_loss"] for row in rows],
        "metrics": [[row["eval_common"], row["eval_words"]] for row in rows],
        "predictions": labelled.predictions.tolist(),
        "labels": labelled.label_ids.tolist(),
        "bare": bare.predictions.tolist(),
    }


def main(folder: Path) -> dict[str, Any]:
    return {"ddp": story(folder / "ddp", 2), "fsdp": story(folder / "fsdp", 2, **SHARDED)}
