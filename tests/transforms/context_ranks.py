"""Run on several ranks: loss and gradients of decoders on divided sequences are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from windlass.config.plan import DistPlan, ShardPlan
from windlass.core.errors import DataError, ModelError
from windlass.core.mesh import Mesh
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.transforms.context import DividedForwards
from windlass.transforms.strategies import spread

_SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXED = {"head_dim": 4, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# Rotations that choose their frequencies by the longest row: those of the 29 tokens, of which a rank may have less.
_LONG: dict[str, Any] = {
    "rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0], "rope_theta": 1e4,
    "original_max_position_embeddings": 24,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": _SIZES,
    "Qwen3Config": _SIZES | {"head_dim": 4},
    "MistralConfig": _SIZES | {"sliding_window": 5},
    "Gemma3TextConfig": _SIZES | _MIXED,
    "Phi3Config": _SIZES | {"original_max_position_embeddings": 24, "rope_parameters": _LONG},
    "Qwen2Config": _SIZES | {"max_position_embeddings": 24, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4
    }},
}  # fmt: skip
# Norms that are computed in single precision, whatever the weights have.
_SINGLE_INSIDE = {"Gemma3TextConfig"}
_REFUSED: dict[str, dict[str, Any]] = {
    "Gemma2Config": _SIZES | _MIXED | {"attn_logit_softcapping": 0.5},
    "GptOssConfig": _SIZES | _MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Lfm2Config": _SIZES | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    # Chunks, and scales of queries, of which a short row shows nothing.
    "Llama4TextConfig": _SIZES | {"head_dim": 4, "attention_chunk_size": 99, "num_local_experts": 2},
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


def _check(name: str, context_ranks: Gang, recompute: bool) -> None:
    plain = _model(name, _CONFIGS[name])
    model = copy.deepcopy(plain)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    limit = 1e-6 if name in _SINGLE_INSIDE else 1e-12
    method = context_ranks.mesh
    divided = DividedForwards(model, context_ranks)
    for kind, batch in _batches().items():
        count = int((batch["labels"][:, 1:] != -100).sum())
        plain.zero_grad()
        model.zero_grad()
        targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        expected = _loss(plain(**batch, use_cache=False).logits, targets, count)
        expected.backward()
        outputs = model(**batch, num_items_in_batch=count)
        loss = _loss(outputs.logits, targets, count)
        # The model's own loss is the same, in single precision.
        assert (outputs.loss - loss).abs() < 1e-5, (name, method, kind)
        loss.backward()
        assert (loss - expected).abs() < limit, (name, method, kind, loss, expected)
        for key, gradient in _gradients(model).items():
            dist.all_reduce(gradient)
            worst = (gradient / context_ranks.size - _gradients(plain)[key]).abs().max().item()
            assert worst < limit, (name, method, kind, key, worst)
    whole = _batches()["plain"]["input_ids"]
    one, other = (m.eval().generate(whole, max_new_tokens=3, do_sample=False) for m in (plain, model))
    assert torch.equal(one, other), name
    divided.release()
    assert model.config._attn_implementation == plain.config._attn_implementation


def _check_refusals(context_ranks: Gang) -> None:
    for name, options in _REFUSED.items():
        model = _model(name, options).float()  # experts are not multiplied in float64
        with pytest.raises(ModelError, match="divided"):
            DividedForwards(model, context_ranks)
    model = _model("Llama4TextConfig", _REFUSED["Llama4TextConfig"] | {"no_rope_layers": [0, 0]}).float()
    with pytest.raises(ModelError, match=r"\(attn_temperature_tuning\)"):
        DividedForwards(model, context_ranks)
    for task in (transformers.LlamaForSequenceClassification, transformers.LlamaForTokenClassification):
        with pytest.raises(ModelError, match="has no output embeddings"):
            DividedForwards(task(transformers.LlamaConfig(**_SIZES)), context_ranks)
    model = _model("LlamaConfig", _SIZES)
    divided = DividedForwards(model, context_ranks)
    ids = _batches()["plain"]["input_ids"]
    for wrong in ({"token_type_ids": ids}, {"output_hidden_states": True}, {"position_ids": ids[None]}):
        with pytest.raises(ModelError, match=f"got {next(iter(wrong))}"):
            model(input_ids=ids, **wrong)
    with pytest.raises(DataError, match="different batches"):
        model(input_ids=ids + context_ranks.rank)
    divided.release()


def _check_half_precision(loss_ranks: Gang) -> None:
    """Units that compute in few bits may return more: their rounding is still that of the few."""
    shard = ShardPlan(param_dtype="bf16", output_dtype="fp32")
    plan = DistPlan(strategy="fsdp", shard=shard, context=loss_ranks.mesh.context)
    model = _model("LlamaConfig", _SIZES).float()
    strategy = spread(model, plan, loss_ranks, torch.device("cpu"))
    assert model(input_ids=_batches()["plain"]["input_ids"]).logits.dtype is torch.float32
    strategy.release()


def _check_randomness(context_ranks: Gang) -> None:
    """Ranks drop different values, and draw the same ones after a forward, also after one that failed."""
    model = _model(
        "GPT2Config", {"vocab_size": 23, "n_embd": 8, "n_layer": 1, "n_head": 4, "attn_pdrop": 0.0}
    )
    divided = DividedForwards(model.train(), context_ranks)
    dropped: list[Tensor] = []
    model.transformer.drop.register_forward_hook(lambda _, __, output: dropped.append(output == 0))
    torch.manual_seed(3)
    model(input_ids=torch.ones(1, 32, dtype=torch.int64))
    same, drawn = [], torch.rand(4)
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 32), 99))
    for value in (dropped[0].double(), drawn.double(), torch.rand(4, dtype=torch.float64)):
        total = value.clone()
        dist.all_reduce(total)
        same.append(torch.allclose(total, value * context_ranks.size))
    assert same == [False, True, True]
    divided.release()


def main() -> None:
    world = world_from_environment()
    layouts = [Mesh(context=world.size), Mesh(sequence=world.size)]
    if world.size == 4:
        layouts.append(Mesh(context=2, sequence=2))
    for mesh in layouts:
        loss_ranks = join(world, torch.device("cpu"), mesh=mesh)
        context_ranks = loss_ranks.over("context")
        for name in _CONFIGS:
            _check(name, context_ranks, recompute=name == "LlamaConfig")
        if mesh.sequence == 1:
            _check_refusals(context_ranks)
            _check_randomness(context_ranks)
            _check_half_precision(loss_ranks.over("loss"))
        leave()
