"""Tiny models with a head that is wider than its input, and rows for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from windlass import Trainer, TrainingArguments

_WORDS, _LENGTH = 48, 10
_SIZES = {"vocab_size": _WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_T5 = {"vocab_size": _WORDS, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
_BART = {
    **{f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    "vocab_size": _WORDS,
    "d_model": 16,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
_EXPERTS = {
    "experts_implementation": "eager",
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
_BERT = {**_SIZES, "num_attention_heads": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "causal": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_HEADS}),
    "tied": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_HEADS, "tie_word_embeddings": True}),
    "experts": ("MixtralForCausalLM", "MixtralConfig", {**_SIZES, **_HEADS, **_EXPERTS}),
    "pairs": ("T5ForConditionalGeneration", "T5Config", {**_T5, **_ENDS}),
    "pairs with an offset": ("MarianMTModel", "MarianConfig", {**_BART, **_ENDS}),
    "masked": ("BertForMaskedLM", "BertConfig", _BERT),
    "classes of tokens": ("BertForTokenClassification", "BertConfig", {**_BERT, "num_labels": 40}),
    "classes of rows": ("BertForSequenceClassification", "BertConfig", {**_BERT, "num_labels": 40}),
    "classes of last tokens": (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**_SIZES, **_HEADS, "num_labels": 40, "pad_token_id": 0},
    ),
}


def model_of(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    name, config, options = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**{**options, **changes}))
    if family == "pairs with an offset":
        model.final_logits_bias.normal_()
    return model.to(dtype)


def rows_for(family: str, count: int = 16) -> list[dict[str, Any]]:
    """Rows with different numbers of targets."""
    generator, rows = torch.Generator().manual_seed(1), []
    for number in range(count):
        ids = torch.randint(3, _WORDS, (_LENGTH,), generator=generator)
        labels: Any = ids.clone() % (40 if "classes" in family else _WORDS)
        labels[: number % 5] = -100
        if family.startswith("pairs"):
            labels = labels[2:].clone()
        if family in ("classes of rows", "classes of last tokens"):
            labels = int(ids[0]) % 40
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def train(
    folder: Path,
    family: str = "causal",
    *,
    kind: type[Trainer] = Trainer,
    model: nn.Module | None = None,
    resume: str | None = None,
    callbacks: Any = None,
    compute_loss_func: Any = None,
    **changes: Any,
) -> Trainer:
    chosen: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**chosen, **changes})
    trainer = kind(
        model or model_of(family),
        args,
        train_dataset=rows_for(family),
        callbacks=callbacks,
        compute_loss_func=compute_loss_func,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
