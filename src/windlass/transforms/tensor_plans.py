"""The plans for tensor parallelism of families whose models have none: patterns of names -> style, by model type."""

from __future__ import annotations

from typing import Any

from torch import nn

# The attention of these families does not take a part of the heads: queries, keys and values of GPT-2 are one weight,
# and the layers of T5 share a bias of all heads. So its weights are divided, and its outputs are gathered.
_WHOLE_OUTPUT, _WHOLE_INPUT = "colwise_gather_output", "rowwise_split_input"


def _gpt2() -> dict[str, str]:
    styles = {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": _WHOLE_OUTPUT,
        "h.*.attn.c_proj": _WHOLE_INPUT,
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
    return {
        "lm_head": _WHOLE_OUTPUT,
        **{f"{prefix}{path}": style for prefix in ("", "transformer.") for path, style in styles.items()},
    }


def _t5() -> dict[str, str]:
    attention = {"q": _WHOLE_OUTPUT, "k": _WHOLE_OUTPUT, "v": _WHOLE_OUTPUT, "o": _WHOLE_INPUT}
    styles = {
        "embed_tokens": "embedding_rowwise",
        **{
            f"block.*.layer.*.{kind}.{name}": style
            for kind in ("SelfAttention", "EncDecAttention")
            for name, style in attention.items()
        },
        **{f"block.*.layer.*.DenseReluDense.{name}": "colwise" for name in ("wi", "wi_0", "wi_1")},
        "block.*.layer.*.DenseReluDense.wo": "rowwise",
    }
    return {
        "lm_head": _WHOLE_OUTPUT,
        "shared": "embedding_rowwise",
        **{f"{stack}.{path}": style for stack in ("encoder", "decoder") for path, style in styles.items()},
    }


_PLANS = {"gpt2": _gpt2, "t5": _t5, "mt5": _t5, "umt5": _t5}


def plan_of(model: nn.Module) -> Any:
    """The plan of a model: its attribute `tp_plan`, else that of its family, else what the attribute is."""
    own = getattr(model, "tp_plan", None)
    family = _PLANS.get(getattr(getattr(model, "config", None), "model_type", None) or "")
    return own if own or family is None else family()
