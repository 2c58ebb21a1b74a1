"""Attentions of which each rank of a tensor gang has some heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tests.dist.launch import on_ranks
from tests.transforms.test_expert_layers import ROWS, Mixture, loss_of
from torch import Tensor, nn

from windlass.core.mesh import Mesh
from windlass.core.world import world_from_environment
from windlass.dist.gang import join, leave
from windlass.dist.sharded import whole
from windlass.transforms.tensor_parallel import TensorParallel
from windlass.transforms.tensor_plan import EXPERTS

pytest.importorskip("transformers")


@pytest.mark.dist
def test_ranks_have_some_heads() -> None:
    on_ranks(2, main, ["opt", "gptj", "bloom", "t5", "mt5", "umt5"])


# --- what each rank runs ----------------------------------------------------------------------------------------------


_T5: dict[str, Any] = {
    "vocab_size": 24, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", {"vocab_size": 24, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "dropout": 0.0,
                          "num_attention_heads": 4, "max_position_embeddings": 16, "word_embed_proj_dim": 16}),
    "gptj": ("GPTJConfig", {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
                            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 16}),
    "bloom": ("BloomConfig", {"vocab_size": 24, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "t5": ("T5Config", _T5), "mt5": ("MT5Config", _T5), "umt5": ("UMT5Config", _T5),
}  # fmt: skip
_ATTENTIONS = ("self_attn", "self_attention", "attn", "SelfAttention", "EncDecAttention")
# Their softmax and angles are computed in single precision.
_LIMITS = dict.fromkeys(("gptj", "bloom", "t5", "mt5", "umt5"), 1e-6)


def _loss(model: Any, ids: Tensor) -> Tensor:
    found = model(input_ids=ids, **({"labels": ids} if model.config.is_encoder_decoder else {}))
    loss: Tensor = nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return loss


def _check(name: str, ranks: Any, positions: bool) -> None:
    kind, options = _MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**options)
    auto = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    plain = auto.from_config(config).double().train()
    model = copy.deepcopy(plain)
    strategy = TensorParallel(model, ranks, torch.device("cpu"), positions)
    attentions = [part for path, part in model.named_modules() if path.rpartition(".")[2] in _ATTENTIONS]
    counts = {
        getattr(part, count)
        for part in attentions
        for count in ("num_heads", "n_heads")
        if hasattr(part, count)
    }
    assert attentions, name
    assert counts | {2} == {2}, (name, counts)
    ids = torch.randint(1, 24, (2, 7), generator=torch.Generator().manual_seed(1))
    expected = _loss(plain, ids)
    expected.backward()
    with strategy.micro(last=True):
        loss = _loss(model, ids)
        loss.backward()
    limit = _LIMITS.get(name, 1e-12)
    assert (loss - expected).abs() < limit, (name, loss, expected)
    for (path, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = torch.zeros_like(wanted) if parameter.grad is None else whole(parameter.grad)
        assert (found - (0 if wanted.grad is None else wanted.grad)).abs().max() < limit, (name, path)
    model.zero_grad()
    with strategy.gathered(), torch.no_grad():
        assert (_loss(model, ids) - expected).abs() < limit, (name, "whole parameters")
    assert (_loss(model, ids) - expected).abs() < limit, (name, "divided again")
    with pytest.raises(IndexError, match="24 is out of bounds"):
        _loss(model, ids.where(ids != ids[0, 0], 24))


def _check_experts(ranks: Any) -> None:
    """A rank whose experts get no token has zeros as their gradients, as one process has."""
    plain = Mixture(alone=True).double()
    model = copy.deepcopy(plain)
    model.tp_plan = {"experts.*": EXPERTS}  # type: ignore[assignment]
    strategy = TensorParallel(model, ranks, torch.device("cpu"))
    loss_of(plain, ROWS).backward()
    with strategy.micro(last=True):
        loss_of(model, ROWS).backward()
    for (path, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), wanted.grad, msg=path)


def main(names: list[str]) -> None:
    ranks = join(world_from_environment(), torch.device("cpu"), mesh=Mesh(tensor=2)).over("loss")
    for name in names:
        _check(name, ranks, positions=False)
        if name in ("gptj", "bloom"):  # OPT makes its rows flat in between, and the others have an encoder
            _check(name, ranks, positions=True)
    _check_experts(ranks)
    dist.barrier()
    leave()
