"""A small language model with an adapter, and runs of it that are stopped and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.elastic_ranks import StopAt
from tests.trainer.small import arguments

from windlass import Trainer


def base(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    return LlamaForCausalLM(config).double()


def adapted(seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    model = base(seed)
    torch.manual_seed(7)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, config).double()


def prompted(kind: str) -> Any:
    """Learnt prompts: "prompt" and "prefix" are rows of an embedding; those of "encoder" come from layers."""
    from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model

    made: dict[str, Any] = {
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "encoder": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    }
    model = base()
    torch.manual_seed(7)
    return get_peft_model(model, made[kind]).double()


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {"input_ids": ids.tolist(), "labels": ids.tolist(), "attention_mask": [1] * 6}
        for ids in torch.randint(0, 19, (32, 6), generator=generator)
    ]


def stretch(folder: Path, stop: int, resume: bool, seed: int = 0, **changes: Any) -> Trainer:
    """Go on to update `stop`, and save there."""
    model = changes.pop("model", None) or adapted(seed)
    callbacks = [StopAt(stop), *changes.pop("callbacks", ())]
    options = {"max_steps": 6, "per_device_train_batch_size": 2, **changes}
    args = arguments(folder, save_strategy="steps", save_steps=100, **options)
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
