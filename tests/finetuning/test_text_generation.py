"""Text generated on a device that needs no copy: what the model's own method returns."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from windlass.finetuning.text_generation import generate


def test_it_is_what_the_model_generates_and_options_reach_it() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    model = GPT2LMHeadModel(config)
    words = torch.randint(2, 32, (2, 5))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    found = generate(model, {"input_ids": words, "attention_mask": torch.ones_like(words)}, **options)
    assert found.shape == (2, 9)
    assert torch.equal(found, model.generate(words, **options))
