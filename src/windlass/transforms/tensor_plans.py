"""The plans for tensor parallelism of families whose models have none: patterns of names -> style, by model type."""

from __future__ import annotations

from typing import Any

from torch import nn

_WHOLE_OUTPUT, _WHOLE_INPUT = "colwise_gather_output", "rowwise_split_input"


def _block(attention: str, made: str, joined: str, up: str, down: str) -> dict[str, str]:
    """Styles of the layers of a block: its attention, in it what makes queries, keys and values and what joins heads,
    and a feed-forward.
    """
    styles = dict.fromkeys(attention.split(), "own_heads") | dict.fromkeys(made.split(), "colwise")
    return styles | {joined: "rowwise"} | dict.fromkeys(up.split(), "colwise") | {down: "rowwise"}


def _decoder(stack: str, embedding: str, blocks: str, styles: dict[str, str]) -> dict[str, str]:
    """The plan of a model with a head, and of its `stack` alone."""
    inner = {
        embedding: "embedding_rowwise",
        **{f"{blocks}.*.{path}": style for path, style in styles.items()},
    }
    return {"lm_head": _WHOLE_OUTPUT, **inner, **{f"{stack}.{path}": style for path, style in inner.items()}}


def _gpt2() -> dict[str, str]:
    # Queries, keys and values are one weight, of which a part would not be one stretch of rows. So it is divided as it
    # is, and its outputs are gathered.
    styles = {"attn.c_attn": _WHOLE_OUTPUT, "attn.c_proj": _WHOLE_INPUT, "mlp.c_fc": "colwise"}
    return _decoder("transformer", "wte", "h", styles | {"mlp.c_proj": "rowwise"})


def _t5() -> dict[str, str]:
    dense = "layer.*.DenseReluDense."
    styles: dict[str, str] = {}
    for kind in ("layer.*.SelfAttention", "layer.*.EncDecAttention"):
        made = " ".join(f"{kind}.{name}" for name in "qkv")
        styles |= _block(kind, made, f"{kind}.o", f"{dense}wi {dense}wi_0 {dense}wi_1", f"{dense}wo")
        styles[f"{kind}.relative_attention_bias"] = "embedding_of_heads"
    encoder, decoder = (_decoder(name, "embed_tokens", "block", styles) for name in ("encoder", "decoder"))
    return {"shared": "embedding_rowwise", **encoder, **decoder}


_PLANS = {
    "gpt2": _gpt2,
    "gptj": lambda: _decoder(
        "transformer",
        "wte",
        "h",
        _block("attn", "attn.q_proj attn.k_proj attn.v_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
    ),
    "bloom": lambda: _decoder(
        "transformer",
        "word_embeddings",
        "h",
        _block(
            "self_attention",
            "self_attention.query_key_value",
            "self_attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        ),
    ),
    "opt": lambda: _decoder(
        "model.decoder",
        "embed_tokens",
        "layers",
        _block(
            "self_attn",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "self_attn.out_proj",
            "fc1",
            "fc2",
        ),
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
