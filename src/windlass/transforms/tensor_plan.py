"""Which layers of a model are divided among the ranks of a tensor gang: its plan, and what it cannot be.

The plan is the attribute `tp_plan`, which models of transformers have: pattern of names, in which * is a number or a
name -> style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.core.errors import ConfigError, Problem

SUMMED = "replicated_with_grad_allreduce"
"""The style of layers that are whole, and compute with some of the heads: their gradients are sums over ranks."""
VOCABULARY = ("colwise_gather_output", "embedding_rowwise")
STYLES = ("colwise", "rowwise", *VOCABULARY, SUMMED)
# Styles of layers that have no weights to divide, or whose division only saves memory: whole here.
_WHOLE = ("replicate", "sequence_parallel")


def chosen_layers(module: nn.Module, ranks: int) -> dict[str, tuple[nn.Module, str]]:
    """The layers that the plan of `module` divides among `ranks`, with their style, by name. Raises ConfigError for a
    model without a plan, or a plan that cannot be followed.
    """
    name = type(module).__name__
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        fix = "has no plan for tensor parallelism: set module.tp_plan = {'layers.*.up': 'colwise', ...}, or tp_size=1"
        raise ConfigError(Problem("model", name, fix))
    unknown = sorted({style for style in plan.values() if style not in (*STYLES, *_WHOLE)})
    if unknown:
        fix = (
            f"its plan has the style {unknown[0]!r}, and these are built: {', '.join(STYLES)}; set tp_size=1"
        )
        raise ConfigError(Problem("model", name, fix))
    _refuse_heads(module, ranks)
    patterns = {
        re.compile(re.escape(pattern).replace(r"\*", "[^.]+")): style for pattern, style in plan.items()
    }
    found = {}
    for path, layer in module.named_modules():
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(path)), None)
        if style is None or style in _WHOLE:
            continue
        if style in VOCABULARY and not _is_divisible(layer, ranks):
            continue
        _check_layer(path, layer, style, ranks)
        found[path] = layer, style
    _drop_tied(module, found)
    if not any(style != SUMMED for _, style in found.values()):
        raise ConfigError(Problem("model", name, "none of its layers has a name of its plan; set tp_size=1"))
    return found


def _refuse_heads(module: nn.Module, ranks: int) -> None:
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(Problem("tp_size", ranks, f"must divide {field}, which is {heads}"))


def _is_divisible(layer: nn.Module, ranks: int) -> bool:
    """Return True for a head or embedding of whose vocabulary each rank gets a part."""
    weight: Any = getattr(layer, "weight", None)
    if weight is None or (isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse)):
        return False
    return bool(-(-weight.shape[0] // ranks) * (ranks - 1) < weight.shape[0])


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
    if style == SUMMED:
        return
    kind = nn.Embedding if style == "embedding_rowwise" else nn.Linear
    if type(layer) is not kind and not (kind is nn.Embedding and isinstance(layer, kind)):
        fix = f"is a {type(layer).__name__}, and only nn.{kind.__name__} is divided so; set tp_size=1"
        raise ConfigError(Problem(f"model.{path}", style, fix))
    if style in VOCABULARY:
        return
    size: Any = layer.in_features if style == "rowwise" else layer.out_features
    if size % ranks:
        raise ConfigError(Problem("tp_size", ranks, f"must divide the size of {path}, which is {size}"))
