"""A small language model with its tokenizer, and rows of text for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from windlass.finetuning.sft_config import SFTConfig

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "two",
    "dogs",
    "run",
    "past",
    "one",
    "old",
    "red",
    "barn",
    "near",
    "my",
    "quiet",
    "green",
    "field",
]
CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> Any:
    """Words and a few special tokens; `<eos>` ends a text."""
    import tokenizers as tk
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, *"0123456789"])}
    inner = tk.Tokenizer(tk.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    made.add_tokens([], special_tokens=False)
    made.chat_template = CHAT
    return made


def model(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**changes))


def config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "vocab_size": 36, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


def saved(folder: Path, **changes: Any) -> str:
    """A folder with the model and its tokenizer."""
    model(**changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def texts(count: int = 17) -> list[dict[str, Any]]:
    """Rows of plain text of 3 to 11 words."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 12, (count,), generator=draw).tolist()
    picked = [torch.randint(0, len(WORDS), (n,), generator=draw).tolist() for n in lengths]
    return [{"text": " ".join(WORDS[i] for i in row)} for row in picked]


def prompts(count: int = 17) -> list[dict[str, Any]]:
    """Rows with a prompt and a completion."""
    rows = [row["text"].split() for row in texts(count)]
    return [{"prompt": " ".join(row[:2]), "completion": " " + " ".join(row[2:])} for row in rows]


def chats(count: int = 17) -> list[dict[str, Any]]:
    """Conversations of two turns."""
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"].strip()},
            ]
        }
        for row in prompts(count)
    ]


def table(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


def arguments(folder: Path, **changes: Any) -> SFTConfig:
    """Short runs in float32 on the CPU, without recomputation."""
    options: dict[str, Any] = {
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "max_steps": 3,
        "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "disable_tqdm": True, "max_length": 64, "seed": 1,
    }  # fmt: skip
    return SFTConfig(str(folder), **{**options, **changes})
