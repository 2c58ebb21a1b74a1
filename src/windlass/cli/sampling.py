"""Let the model write: the sentence shown before and after training."""

from __future__ import annotations

from typing import Any

import torch

from windlass.cli.recipe_parts import RecipeParts
from windlass.core.rng import preserved_rng

# Both sentences are drawn with the same luck, so that what differs between them is the training.
LUCK = 0


def continue_prompt(parts: RecipeParts, model: Any) -> str | None:
    """`sample.prompt` continued by `model`, on one line; None where the recipe shows nothing."""
    sample = parts.recipe.sample
    if not sample.prompt:
        return None
    device = next(model.parameters()).device
    prompt = parts.tokenizer(sample.prompt, return_tensors="pt", add_special_tokens=False).to(device)
    room = getattr(model.config, "max_position_embeddings", None)
    most = (
        sample.max_new_tokens
        if room is None
        else min(sample.max_new_tokens, room - prompt["input_ids"].shape[1])
    )
    if most < 1:
        return None
    choice = (
        {"do_sample": True, "temperature": sample.temperature, "top_k": 0}
        if sample.temperature
        else {"do_sample": False}
    )
    was_training = model.training
    model.eval()
    with preserved_rng(device), torch.no_grad():
        torch.manual_seed(LUCK)
        ids = model.generate(
            **prompt, max_new_tokens=most, pad_token_id=parts.tokenizer.pad_token_id, **choice
        )
    model.train(was_training)
    return " ".join(parts.tokenizer.decode(ids[0], skip_special_tokens=True).split())
