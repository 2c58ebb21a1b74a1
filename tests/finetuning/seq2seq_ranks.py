"""Run by `torch.distributed.run`: text that several ranks generate, replicated and sharded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.finetuning.test_seq2seq_trainer import exact_share
from tests.finetuning.tiny import encoder_decoder, pairs, settings, tokenizer

from windlass import Seq2SeqTrainer, Seq2SeqTrainingArguments
from windlass.dist.sharded import is_sharded

RANK = int(os.environ.get("RANK", 0))
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


def main() -> None:
    folder = Path(sys.argv[1])
    said = {"ddp": story(folder / "ddp", 2), "fsdp": story(folder / "fsdp", 2, **SHARDED)}
    (folder / f"rank{RANK}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
