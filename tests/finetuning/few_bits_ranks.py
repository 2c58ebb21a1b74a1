"""Run on one or two ranks: an adapter on a 4-bit base, divided by FSDP2, trained, continued and evaluated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tests.finetuning import small
from transformers import BitsAndBytesConfig

from windlass import SFTTrainer
from windlass.dist.sharded import is_sharded, whole

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def run(base: Path, folder: Path, resume: Path | None = None, first: bool = False) -> dict[str, Any]:
    bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.float32
    )
    trainer = SFTTrainer(
        str(base),
        small.arguments(
            folder,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            learning_rate=1e-2,
            optim="sgd",
            per_device_train_batch_size=4 // WORLD,
            model_init_kwargs={"dtype": "float32"},
            **(
                {"fsdp": "full_shard", "fsdp_config": {"cpu_ram_efficient_loading": first}}
                if WORLD > 1
                else {}
            ),
        ),
        train_dataset=small.table(small.texts(16)),
        processing_class=small.tokenizer(),
        quantization_config=bits,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    empty = [n for n, p in trainer.model.named_parameters() if p.is_meta and "base_layer" in n]
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    packed = [p for n, p in trainer.model.named_parameters() if "base_layer" in n]
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "empty": len(empty),
        "sharded": bool(packed) and all(is_sharded(p) for p in packed),
        "adapter": {
            n: whole(p.detach()).flatten().tolist()
            for n, p in trainer.model.named_parameters()
            if p.requires_grad
        },
    }


def main(base: str, folder: Path) -> dict[str, Any]:
    return {
        "whole": run(base, folder / "run"),
        "sent": run(base, folder / "sent", first=True),
        "resumed": run(base, folder / "run", folder / "run" / "checkpoint-2"),
    }
