"""Run on several ranks: loss and gradients of decoders on divided sequences are those of one process."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.world import world_from_environment
from windlass.dist.gang import join, leave
from windlass.transforms.divided_sequences import divide, sequences_divided

_SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXED = {"head_dim": 4, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": _SIZES,
    "Qwen3Config": _SIZES | {"head_dim": 4},
    "MistralConfig": _SIZES | {"sliding_window": 5},
    "Gemma3TextConfig": _SIZES | _MIXED,
}
# Norms that are computed in single precision, whatever the weights have.
_SINGLE_INSIDE = {"Gemma3TextConfig"}
_REFUSED: dict[str, dict[str, Any]] = {
    "Gemma2Config": _SIZES | _MIXED | {"attn_logit_softcapping": 0.5},
    "GptOssConfig": _SIZES | _MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "MambaConfig": {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
}


def _model(name: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**options)
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.float64).train()


def _batches() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 23, (2, 29), generator=generator)  # to be padded: no multiple of 2 or 4
    completion = ids.clone()
    completion[:, :13] = -100
    padded = torch.ones_like(ids)
    padded[1, 17:] = 0
    starts = torch.cat([torch.arange(length) for length in (9, 3, 5, 1, 11)]).expand(2, -1)
    border = torch.where(starts == 0, -100, ids)
    return {
        "plain": {"input_ids": ids, "labels": ids},
        "completion": {"input_ids": ids, "labels": completion},
        "padded": {"input_ids": ids, "labels": ids.masked_fill(padded == 0, -100), "attention_mask": padded},
        "packed": {"input_ids": ids, "labels": border, "position_ids": starts},
    }


def _loss(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def _gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _check(name: str, method: Literal["ring", "ulysses"], recompute: bool) -> None:
    plain = _model(name, _CONFIGS[name])
    divided = copy.deepcopy(plain)
    if recompute:
        divided.gradient_checkpointing_enable({"use_reentrant": False})
    limit = 1e-6 if name in _SINGLE_INSIDE else 1e-12
    with sequences_divided(divided, method, dist.group.WORLD):
        for kind, batch in _batches().items():
            count = int((batch["labels"][:, 1:] != -100).sum())
            plain.zero_grad()
            divided.zero_grad()
            targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            expected = _loss(plain(**batch, use_cache=False).logits, targets, count)
            expected.backward()
            outputs = divided(**(part := divide(batch, method, dist.group.WORLD)), num_items_in_batch=count)
            loss = _loss(outputs.logits, part["shift_labels"], count)
            # The model's own loss is the same, in single precision.
            assert (outputs.loss - loss).abs() < 1e-5, (name, method, kind)
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert (total - expected).abs() < limit, (name, method, kind, total, expected)
            for key, gradient in _gradients(divided).items():
                dist.all_reduce(gradient)
                worst = (gradient - _gradients(plain)[key]).abs().max().item()
                assert worst < limit, (name, method, kind, key, worst)
        whole = _batches()["plain"]["input_ids"]
        one, other = (m.eval().generate(whole, max_new_tokens=3, do_sample=False) for m in (plain, divided))
        assert torch.equal(one, other), name
    assert divided.config._attn_implementation == plain.config._attn_implementation


def main() -> None:
    join(world_from_environment(), torch.device("cpu"))
    for name in _CONFIGS:
        _check(name, "ring", recompute=name == "LlamaConfig")
        _check(name, "ulysses", recompute=name == "LlamaConfig")
    for name, options in _REFUSED.items():
        model = _model(name, options).float()  # experts are not multiplied in float64
        with pytest.raises(ModelError, match="divided"), sequences_divided(model, "ring", dist.group.WORLD):
            pass
    leave()


if __name__ == "__main__":
    main()
