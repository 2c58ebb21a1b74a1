"""Run on ranks: text that is generated in evaluations under a stage of ZeRO, and without.

Args: folder, a stage or "-1".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.finetuning.test_seq2seq_trainer import exact_share
from tests.finetuning.tiny import encoder_decoder, pairs, settings, tokenizer
from tests.zero.runs import WORLD, config

from windlass import Seq2SeqTrainer, Seq2SeqTrainingArguments


def main(folder: Path, stage: int) -> dict[str, Any]:
    # Before the arguments, after which it would be built in parts: it sets whole weights.
    model = encoder_decoder()
    args = Seq2SeqTrainingArguments(
        **settings(
            folder, per_device_train_batch_size=4 // WORLD, per_device_eval_batch_size=2, max_steps=2,
            eval_on_start=True, eval_strategy="steps", eval_steps=2, generation_max_length=9, generation_num_beams=2,
            train_sampling_strategy="sequential", **config(stage),
        )
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model, args, train_dataset=pairs(16), eval_dataset=pairs(11, seed=8),
        processing_class=tokenizer(), compute_metrics=exact_share,
    )  # fmt: skip
    trainer.train()
    labelled, bare = trainer.predict(pairs(7)), trainer.predict(pairs(3, labelled=False), num_beams=1)
    return {
        "losses": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
        "predictions": labelled.predictions.tolist(),
        "labels": labelled.label_ids.tolist(),
        "bare": bare.predictions.tolist(),
        "divided": any(hasattr(p, "ds_id") for p in trainer.model.parameters()),
    }
