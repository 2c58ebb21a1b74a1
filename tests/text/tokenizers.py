"""Tokenizers and short chat templates of the kinds that models have."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer(template: str | None = None) -> Any:
    """A fast tokenizer whose tokens are bytes."""
    import tokenizers as tk
    import transformers

    letters = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    inner = tk.Tokenizer(tk.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tk.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer
