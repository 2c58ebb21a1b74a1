"""Tokenizers and short chat templates of the kinds that models have."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    # one statement for all roles, contents are trimmed, the beginning has a token
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] "
        "+ '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    # reasoning of former turns is removed, and the last turn has an empty one if it has none
    "qwen3": (
        "{%- for m in messages %}{%- set content = m.content %}"
        "{%- if m.role == 'assistant' %}{%- set thought = '' %}"
        "{%- if '</think>' in content %}"
        "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{%- if loop.last %}{{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}"
        "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    # another name of the role, the system's message inside the user's, roles must alternate
    "gemma": (
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
        "{%- set first = messages[0]['content'] + '\\n\\n' -%}"
        "{%- set messages = messages[1:] -%}"
        "{%- else -%}{%- set first = '' -%}{%- endif -%}"
        "{%- for m in messages -%}"
        "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n'"
        " + (first if loop.first else '')"
        " + m['content'] | trim + '<end_of_turn>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
    ),
    # no generation prompt, answers end with the end token
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
        "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    # the end token closes a conversation, not a turn
    "phi3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    # the last turn ends in another way than the former ones
    "gptoss": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content"
        " + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    ),
}  # fmt: skip


def byte_tokenizer(template: str | None = None) -> Any:
    """A fast tokenizer whose tokens are bytes."""
    return _tokenizer([], template)


def word_tokenizer(template: str | None = None) -> Any:
    """A fast tokenizer with tokens of several bytes, some of which join a space and what follows it."""
    return _tokenizer(
        [("t", "h"), ("th", "e"), ("\u0120", "o"), ("i", "n"), ("in", "g"), ("\u0120", "4")], template
    )


def _tokenizer(merges: list[tuple[str, str]], template: str | None) -> Any:
    import tokenizers as tk
    import transformers

    entries = [*sorted(tk.pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    inner = tk.Tokenizer(tk.models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges))
    inner.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tk.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer
