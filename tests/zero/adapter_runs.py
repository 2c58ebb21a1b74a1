"""Run on ranks: adapters trained under a stage of ZeRO, and without DeepSpeed; losses.

Args: folder, then words NAME:KIND:STAGE:STEPS[:resume], each of which is a run of the folder NAME to that step; kinds:
"lora", "prompt", "prefix", "ptuning", "ia3".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import arguments, llama, text_rows
from tests.zero.runs import WORLD, config

from windlass import Trainer


def adapted(kind: str) -> Any:
    import peft

    base = llama()
    torch.manual_seed(1)
    prompt = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    settings: dict[str, Any] = {
        "lora": lambda: peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
        "ia3": lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        "prompt": lambda: peft.PromptTuningConfig(**prompt),
        "prefix": lambda: peft.PrefixTuningConfig(**prompt),
        "ptuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=16, **prompt),
    }
    return peft.get_peft_model(base, settings[kind]())


def trainer(folder: Path, kind: str, stage: int, steps: int) -> Trainer:
    args = arguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=4 // WORLD, max_steps=steps,
        logging_steps=1, save_strategy="steps", save_steps=3, weight_decay=0.1, max_grad_norm=0.5,
        lr_scheduler_type="constant", **config(stage),
    )  # fmt: skip
    return Trainer(adapted(kind), args, train_dataset=text_rows(40), eval_dataset=text_rows(5))


def main(folder: Path, *words: str) -> dict[str, Any]:
    found = {}
    for word in words:
        name, kind, stage, steps, *resume = word.split(":")
        made = trainer(folder / name, kind, int(stage), int(steps))
        made.train(resume_from_checkpoint=bool(resume))
        made.save_model()
        losses = [row["loss"] for row in made.state.log_history if "loss" in row]
        found[name] = [*losses, made.evaluate()["eval_loss"]]
    return found
