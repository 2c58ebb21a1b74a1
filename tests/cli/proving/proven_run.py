"""A run of a model of the kind of `recipe` in test_prove_command.py, on a layout, and on `tp` one of a classifier with
its configuration: python proven_run.py FOLDER tp=2.
"""

from __future__ import annotations

import logging
import sys

import torch
import transformers

from windlass import ParallelismConfig, Trainer, TrainingArguments

logging.getLogger("windlass").setLevel(logging.INFO)
axis, _, size = sys.argv[2].partition("=")
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
ids = torch.arange(8) + 3
args = TrainingArguments(
    f"{sys.argv[1]}/{axis}", max_steps=1, use_cpu=True, report_to="none", save_strategy="no", log_level="info",
    parallelism_config=ParallelismConfig(**{f"{axis}_size": int(size)}), max_grad_norm=1.0,
)  # fmt: skip
rows = [{"input_ids": ids, "labels": ids}] * 8
Trainer(transformers.LlamaForCausalLM(config), args, train_dataset=rows).train()
if axis == "tp":
    config.pad_token_id = 0
    rows = [{"input_ids": ids, "labels": torch.tensor(1)}] * 8
    Trainer(transformers.LlamaForSequenceClassification(config), args, train_dataset=rows).train()
