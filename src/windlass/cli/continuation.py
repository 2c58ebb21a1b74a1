"""Text that a model generates before and after it is trained by a recipe."""

from __future__ import annotations

from typing import Any

import torch

from windlass.cli.schema import RecipeParts
from windlass.cli.text_writer import chat_tokens, positions_left
from windlass.cli.tuning_data import ended_prompt
from windlass.core.rng import preserved_rng
from windlass.finetuning.text_generation import generate

# Of both texts, so that only the training differs.
SEED = 0


def continue_prompt(parts: RecipeParts, trainer: Any) -> str | None:
    """Return `sample.prompt` continued by the model, or its answer to it, on one line; None if there is no prompt."""
    sample, tokenizer, model = parts.recipe.sample, parts.tokenizer, trainer.model
    if not sample.prompt:
        return None
    answers = parts.takes_turns and tokenizer.chat_template is not None
    if answers:
        prompt = chat_tokens(tokenizer, [{"role": "user", "content": sample.prompt}])
    else:
        text = ended_prompt(sample.prompt, parts.recipe.data)
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    device = next(model.parameters()).device
    length = prompt["input_ids"].shape[1]
    most = min(sample.max_new_tokens, positions_left(model.config, length))
    if most < 1:
        return None
    choice: dict[str, Any] = {"do_sample": False}
    if sample.temperature:
        choice = {"do_sample": True, "temperature": sample.temperature, "top_k": 0}
    was_training = model.training
    model.eval()
    # In mixed precision as it is trained: a base of few bits has layers of two dtypes.
    with preserved_rng(device), torch.no_grad(), trainer.compute_loss_context_manager():
        torch.manual_seed(SEED)
        ids = generate(
            model, prompt.to(device), max_new_tokens=most, pad_token_id=tokenizer.pad_token_id, **choice
        )[0]
    model.train(was_training)
    # Of a text all of it, because the blank before a word is decoded with the word before it.
    text = tokenizer.decode(ids[length:] if answers else ids, skip_special_tokens=True)
    return " ".join((f"{sample.prompt} {text}" if answers else text).split())
