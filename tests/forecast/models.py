"""Small Trainers whose runs are looked at, and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from windlass import Trainer, TrainingArguments

ROWS = 2048
VOCABULARY, LENGTH, BATCH, HIDDEN = 320, 32, 4, 64


def llama(layers: int = 2, hidden: int = HIDDEN, **more: Any) -> Any:
    """A new model in the mode of the caller."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * hidden, **more}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, **sizes}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def mixture(layers: int = 2, experts: int = 4) -> Any:
    """A new mixture of experts, of which two compute each token."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": HIDDEN}
    chosen = {"num_hidden_layers": layers, "num_local_experts": experts, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, **sizes, **chosen))


def trainer(folder: Path, model: Any = None, layers: int = 2, length: int = LENGTH, **arguments: Any) -> Any:
    """A Trainer on random tokens."""
    ids = torch.arange(ROWS * length).reshape(ROWS, length) % VOCABULARY
    given = {
        "max_steps": 2, "per_device_train_batch_size": BATCH, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, **arguments,
    }  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(
        llama(layers) if model is None else model, TrainingArguments(str(folder), **given), train_dataset=rows
    )
