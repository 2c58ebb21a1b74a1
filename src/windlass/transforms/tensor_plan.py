"""Which layers of a model are divided among the ranks of a tensor gang: its plan, and what it cannot be.

The plan is the attribute `tp_plan`, which models of transformers have: pattern of names, in which * is a number or a
name -> style. Families without one have theirs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from windlass.core.attributes import text_config
from windlass.core.errors import ConfigError, Problem
from windlass.core.module_state import without_adapters
from windlass.core.optional import is_imported, require
from windlass.transforms.expert_plan import check_experts, style_in

SUMMED = "replicated_with_grad_allreduce"
"""The style of layers that are whole, and compute with some of the heads: their gradients are sums over ranks."""
VOCABULARY = ("colwise_gather_output", "embedding_rowwise")
"""Styles of embeddings, heads, and layers whose outputs are read whole: their sizes need not be divisible."""
ROWS = ("rowwise", "rowwise_split_input")
"""Styles of layers that sum their results: they get a part of the input, or the whole and take their part of it."""
EXPERTS = "moe_tp_experts"
"""The style of layers of experts: each rank computes with some of them."""
HEADS = "own_heads"
"""The style of attentions that count their heads in an attribute: each rank has some of them."""
HEADS_EMBEDDING = "embedding_of_heads"
"""The style of embeddings with a column for each head."""
STYLES = ("colwise", *ROWS, *VOCABULARY, SUMMED, EXPERTS, HEADS, HEADS_EMBEDDING)
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
ADAPTED = ".base_layer"
"""The end of the name of a layer that has an adapter of peft."""
# Styles of layers that have no weights to divide, or whose division only saves memory: whole here.
_WHOLE = ("replicate", "sequence_parallel")
# Styles of parameters of layers of experts, of which each rank has those of its experts.
_OF_EXPERTS = ("packed_colwise", "packed_rowwise")


def chosen_layers(module: nn.Module, ranks: int) -> dict[str, tuple[nn.Module, str]]:
    """The layers that the plan of `module` divides among `ranks`, with their style, by name. Raises ConfigError for a
    model without a plan, or a plan that cannot be followed.
    """
    name, base = type(module).__name__, without_adapters(module)
    plan = _plan_of(base)
    if not isinstance(plan, Mapping) or not plan:
        fix = "has no plan for tensor parallelism: set module.tp_plan = {'layers.*.up': 'colwise', ...}, or tp_size=1"
        raise ConfigError(Problem("model", name, fix))
    # A style that is not known must not be left whole: others may depend on it, such as a row-wise layer on its parts.
    unknown = sorted({style for style in plan.values() if style not in (*STYLES, *_WHOLE, *_OF_EXPERTS)})
    if unknown:
        fix = (
            f"its plan has the style {unknown[0]!r}, and these are built: {', '.join(STYLES)}; set tp_size=1"
        )
        raise ConfigError(Problem("model", name, fix))
    _refuse_heads(module, ranks)
    for config in getattr(module, "peft_config", {}).values():
        if getattr(config.peft_type, "value", None) == "PREFIX_TUNING":
            fix = "learns keys and values of all heads, of which each rank has a part: use LoRA, or set tp_size=1"
            raise ConfigError(Problem("peft_config", type(config).__name__, fix))
    for path, _ in (*base.named_modules(), *base.named_parameters()):
        outer = path.rpartition(".")[0]
        if (style := style_in(plan, path)) in _OF_EXPERTS and style_in(plan, outer) != EXPERTS:
            fix = f"is the style of a parameter of a layer of experts, which has the style {EXPERTS!r}; set tp_size=1"
            raise ConfigError(Problem(f"model.{path}", style, fix))
    found = {}
    for path, layer in base.named_modules():
        style = style_in(plan, path)
        if style is None or style in _WHOLE:
            continue
        # Whole on every rank it costs memory, and is as right.
        if style in VOCABULARY and not _is_divisible(layer, ranks):
            continue
        for name_of_part, part in _with_adapters(path, layer, style):
            _check_layer(name_of_part, part, style, ranks)
            found[name_of_part] = part, style
    # After all: whether a tie can stay depends on the other layers that have the weight.
    _drop_tied(module, found)
    if not any(style not in (SUMMED, HEADS) for _, style in found.values()):
        raise ConfigError(Problem("model", name, "none of its layers has a name of its plan; set tp_size=1"))
    return found


def _with_adapters(path: str, layer: nn.Module, style: str) -> Iterator[tuple[str, nn.Module]]:
    """The layer; of one with low-rank adapters (arXiv:2106.09685) the layer itself, and the factor of each adapter that
    has the divided dimension: B makes the outputs, A takes the inputs. The other factor is whole.
    """
    own = getattr(layer, "base_layer", None)
    if not isinstance(own, nn.Module):
        yield path, layer
        return
    factor = "lora_A" if style == "rowwise" else "lora_B"
    factors = getattr(layer, factor, None)
    more = ("lora_embedding_A", "lora_magnitude_vector", "lora_variant")
    if style not in ("colwise", "rowwise") or not factors or any(getattr(layer, name, None) for name in more):
        fix = "has an adapter that is not divided: use plain LoRA, or set tp_size=1"
        raise ConfigError(Problem(f"model.{path}", type(layer).__name__, fix))
    yield path + ADAPTED, own
    for name, part in factors.items():
        yield f"{path}.{factor}.{name}", part


def _refuse_heads(module: nn.Module, ranks: int) -> None:
    text = text_config(module)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(Problem("tp_size", ranks, f"must divide {field}, which is {heads}"))


def _is_divisible(layer: nn.Module, ranks: int) -> bool:
    """Return True for a head or embedding of whose vocabulary each rank gets a part."""
    if not _is_linear(layer) and not isinstance(layer, nn.Embedding):
        return False  # as one of which peft trains a copy
    weight: Any = layer.weight
    size = weight.shape[1 if is_transposed(layer) else 0]
    if isinstance(layer, nn.Embedding) and (
        layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq
    ):
        return False
    return bool(-(-size // ranks) * (ranks - 1) < size)


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_transposed(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Whether the layer is a `Conv1D` of transformers: a linear layer whose weight has its inputs in rows."""
    if not is_imported("transformers"):
        return False
    kind = require("transformers", "divide its layers").pytorch_utils.Conv1D
    return isinstance(layer, kind)


def _drop_tied(module: nn.Module, found: dict[str, tuple[nn.Module, str]]) -> None:
    """Leave the layers of a weight whole if one of them stays whole, or is divided along another dimension."""
    owners: dict[int, list[nn.Module]] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(part)
    styles = {id(layer): style for layer, style in found.values()}
    for path, (layer, style) in list(found.items()):
        tied = {styles.get(id(owner)) for p in layer.parameters(recurse=False) for owner in owners[id(p)]}
        if tied == {style} or tied <= set(VOCABULARY):
            continue
        if style not in VOCABULARY:
            fix = "is tied to a layer that is not divided in the same way; set tp_size=1"
            raise ConfigError(Problem(f"model.{path}", style, fix))
        del found[path]


def _check_layer(path: str, layer: nn.Module, style: str, ranks: int) -> None:
    if style == SUMMED or style in VOCABULARY:
        return
    if style == EXPERTS:
        check_experts(path, layer, dict(layer.named_parameters()), {"tp_size": ranks})
        return
    if style == HEADS:
        counted = [vars(layer)[name] for name in HEAD_COUNTS if name in vars(layer)]
        if not counted or any(count % ranks for count in counted):
            fix = f"counts its heads in none of {', '.join(HEAD_COUNTS)}, or not in a multiple of tp_size={ranks}"
            raise ConfigError(Problem(f"model.{path}", style, fix))
        return
    if style == HEADS_EMBEDDING and isinstance(layer, nn.Embedding):
        return
    if not _is_linear(layer):
        fix = f"is a {type(layer).__name__}, and only nn.Linear is divided; set tp_size=1"
        raise ConfigError(Problem(f"model.{path}", style, fix))
    inputs_first = is_transposed(layer)
    size = layer.get_parameter("weight").shape[int((style in ROWS) != inputs_first)]
    if size % ranks:
        raise ConfigError(Problem("tp_size", ranks, f"must divide the size of {path}, which is {size}"))


# --- the plans of families whose models have none ---------------------------------------------------------------------


def _block(attention: str, made: str, joined: str, up: str, down: str) -> dict[str, str]:
    """Styles of the layers of a block: its attention, in it what makes queries, keys and values and what joins heads,
    and a feed-forward.
    """
    inputs = [f"{attention}.{name}" for name in made.split()]
    styles = {attention: HEADS, **dict.fromkeys(inputs, "colwise"), f"{attention}.{joined}": "rowwise"}
    return styles | dict.fromkeys(up.split(), "colwise") | {down: "rowwise"}


def _decoder(stack: str, embedding: str, blocks: str, styles: Mapping[str, str]) -> dict[str, str]:
    """The plan of a model with a head, and of its `stack` alone."""
    inner = {embedding: "embedding_rowwise"} | {f"{blocks}.*.{path}": s for path, s in styles.items()}
    return {"lm_head": "colwise_gather_output", **inner} | {f"{stack}.{path}": s for path, s in inner.items()}


def _gpt2() -> dict[str, str]:
    # Queries, keys and values are one weight, of which a part would not be one stretch of rows. So it is divided as it
    # is, and its outputs are gathered.
    attention = {"attn.c_attn": "colwise_gather_output", "attn.c_proj": "rowwise_split_input"}
    return _decoder("transformer", "wte", "h", attention | {"mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"})


def _t5() -> dict[str, str]:
    dense = "layer.*.DenseReluDense."
    styles: dict[str, str] = {}
    for kind in ("layer.*.SelfAttention", "layer.*.EncDecAttention"):
        styles |= _block(kind, "q k v", "o", f"{dense}wi {dense}wi_0 {dense}wi_1", f"{dense}wo")
        styles[f"{kind}.relative_attention_bias"] = HEADS_EMBEDDING
    encoder, decoder = (_decoder(name, "embed_tokens", "block", styles) for name in ("encoder", "decoder"))
    return {"shared": "embedding_rowwise", **encoder, **decoder}


_GPTJ = _block("attn", "q_proj k_proj v_proj", "out_proj", "mlp.fc_in", "mlp.fc_out")
_BLOOM = _block("self_attention", "query_key_value", "dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_OPT = _block("self_attn", "q_proj k_proj v_proj", "out_proj", "fc1", "fc2")
# By the model type of a configuration.
_OF_FAMILIES = {
    "gpt2": _gpt2(),
    "gptj": _decoder("transformer", "wte", "h", _GPTJ),
    "bloom": _decoder("transformer", "word_embeddings", "h", _BLOOM),
    "opt": _decoder("model.decoder", "embed_tokens", "layers", _OPT),
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5()),
}


def _plan_of(model: nn.Module) -> Any:
    """The plan of a model: its attribute `tp_plan`, else that of its family, else what the attribute is."""
    own = getattr(model, "tp_plan", None)
    family = _OF_FAMILIES.get(getattr(getattr(model, "config", None), "model_type", None) or "")
    return own if own or family is None else family
