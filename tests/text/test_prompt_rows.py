"""A prompt that is answered has the tokens that training gives it, whatever special tokens it ends or begins with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tokenizers import byte_tokenizer

from windlass.core.types import IGNORED
from windlass.text.prepare_text import prepare_text
from windlass.text.prompt_rows import PromptReader

pytest.importorskip("tokenizers")


def ending(begins: bool, ends: bool) -> Any:
    """A tokenizer that puts its own tokens around every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    parts = ["<bos>"] * begins + ["$A"] + ["<eos>"] * ends
    special = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    if begins or ends:
        processor = TemplateProcessing(single=" ".join(parts), special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


TOKENIZERS = [ending(begins, ends) for begins in (False, True) for ends in (False, True)]
Texts = st.lists(st.sampled_from(["<bos>", "<eos>", "a", " b", "\n"]), min_size=1, max_size=5).map("".join)


@given(Texts, st.sampled_from(TOKENIZERS))
def test_a_prompt_has_the_tokens_of_training(prompt: str, tokenizer: Any) -> None:
    row = {"prompt": prompt, "completion": "x"}
    trained = prepare_text([row], tokenizer).dataset[0]
    before = [
        token
        for token, label in zip(trained["input_ids"], trained["labels"], strict=True)
        if label == IGNORED
    ]
    assert PromptReader(tokenizer, "text").of_row(row, 0).ids == before
