"""Text generated on a device that needs no copy: what the model's own method returns."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

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


def test_a_mixture_that_is_balanced_continues_prompts_of_different_lengths() -> None:
    """Its balancing loss, which nothing reads here, would take the mask of all tokens for that of the last."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": None}
    config = MixtralConfig(vocab_size=32, output_router_logits=True, **sizes, **heads)
    model = MixtralForCausalLM(config)
    words, mask = torch.tensor([[0, 7, 4, 9], [5, 3, 8, 2]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    found = generate(model, {"input_ids": words, "attention_mask": mask}, max_new_tokens=3, do_sample=False)
    assert found.shape == (2, 7)
    assert config.output_router_logits, "the next training step needs it"
    config.output_router_logits = False
    assert torch.equal(found, model.generate(words, attention_mask=mask, max_new_tokens=3, do_sample=False))


class Counts(nn.Module):
    """A model of a script's own, which has no configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(1))

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids + self.step.long()


def test_a_model_without_a_configuration_generates_too() -> None:
    assert generate(Counts(), {"input_ids": torch.tensor([[1, 2]])}).tolist() == [[2, 3]]
