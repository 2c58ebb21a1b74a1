"""A language model trained on ranks with a configuration file, which may be divided while it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.small import arguments, llama, text_rows
from tests.zero.runs import RANK, WORLD

from windlass import Trainer


def main(place: Path, file: str, init: bool = False) -> dict[str, Any]:
    if init:
        from windlass.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

        config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
        kept = HfDeepSpeedConfig(config)  # models of transformers are divided while this object lives
        import deepspeed
        import transformers

        assert is_deepspeed_zero3_enabled()
        assert not deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"], (
            "it would compile what it does not use"
        )
        llama().save_pretrained(place / f"from{RANK}")
        model = transformers.AutoModelForCausalLM.from_pretrained(place / f"from{RANK}")
        assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
        del kept
    else:
        model = llama()
    args = arguments(
        place, deepspeed=file, per_device_train_batch_size=2, gradient_accumulation_steps=4 // WORLD, max_steps=6,
        warmup_steps=2, logging_steps=1, weight_decay=0.1,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=text_rows(40), eval_dataset=text_rows(5))
    trainer.train()
    trainer.save_model()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    found = {key: [row[key] for row in rows] for key in ("loss", "grad_norm", "learning_rate")}
    found["evaluation"] = trainer.evaluate()["eval_loss"]
    return found
