"""The plans for tensor parallelism of families whose models have none: patterns of names -> style, by model type."""

from __future__ import annotations

from typing import Any

from torch import nn

# The attention of these families does not take a part of the heads: queries, keys and values of GPT-2 and Bloom are one
# weight, the layers of T5 share a bias of all heads. So its weights are divided, and its outputs are gathered.
_WHOLE_OUTPUT, _WHOLE_INPUT = "colwise_gather_output", "rowwise_split_input"


def _block(made: str, joined: str, up: str, down: str) -> dict[str, str]:
    """Styles of the layers of a block: what makes queries, keys and values, what joins heads, and a feed-forward."""
    styles = dict.fromkeys(made.split(), _WHOLE_OUTPUT) | dict.fromkeys(joined.split(), _WHOLE_INPUT)
    return styles | dict.fromkeys(up.split(), "colwise") | {down: "rowwise"}


def _decoder(stack: str, embedding: str, blocks: str, styles: dict[str, str]) -> dict[str, str]:
    """The plan of a model with a head, and of its `stack` alone."""
    inner = {
        embedding: "embedding_rowwise",
        **{f"{blocks}.*.{path}": style for path, style in styles.items()},
    }
    return {"lm_head": _WHOLE_OUTPUT, **inner, **{f"{stack}.{path}": style for path, style in inner.items()}}


def _t5() -> dict[str, str]:
    kinds = ("SelfAttention", "EncDecAttention")
    made = " ".join(f"layer.*.{kind}.{name}" for kind in kinds for name in "qkv")
    joined = " ".join(f"layer.*.{kind}.o" for kind in kinds)
    dense = "layer.*.DenseReluDense."
    styles = _block(made, joined, f"{dense}wi {dense}wi_0 {dense}wi_1", f"{dense}wo")
    encoder, decoder = (_decoder(name, "embed_tokens", "block", styles) for name in ("encoder", "decoder"))
    return {"shared": "embedding_rowwise", **encoder, **decoder}


_PLANS = {
    "gpt2": lambda: _decoder(
        "transformer", "wte", "h", _block("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ),
    "gptj": lambda: _decoder(
        "transformer",
        "wte",
        "h",
        _block("attn.q_proj attn.k_proj attn.v_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
    ),
    "bloom": lambda: _decoder(
        "transformer",
        "word_embeddings",
        "h",
        _block(
            "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
        ),
    ),
    "opt": lambda: _decoder(
        "model.decoder",
        "embed_tokens",
        "layers",
        _block("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"),
    ),
    "t5": _t5,
    "mt5": _t5,
    "umt5": _t5,
}


def plan_of(model: nn.Module) -> Any:
    """The plan of a model: its attribute `tp_plan`, else that of its family, else what the attribute is."""
    own = getattr(model, "tp_plan", None)
    family = _PLANS.get(getattr(getattr(model, "config", None), "model_type", None) or "")
    return own if own or family is None else family()
