"""Parameter groups for weight decay: all parameters but norms and biases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

# By name as well as by type: models have norm classes of their own (LlamaRMSNorm, T5LayerNorm, ...).
_KEPT_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # every batch and instance norm
)


def decay_parameter_names(model: nn.Module, norms: tuple[type[nn.Module], ...] = _NORMS) -> list[str]:
    """Names of the parameters that weight decay applies to: of `parameter_names` all but norms and biases.

    Left out: parameters of norm layers (torch's types, or those in `norms`), and those with bias or norm in their name.
    """
    return parameter_names(model, norms, [_KEPT_NAMES])


def parameter_names(
    model: nn.Module,
    without_types: tuple[type[nn.Module], ...],
    without_names: Sequence[re.Pattern[str]] = (),
) -> list[str]:
    """Names of the model's parameters, submodules before their parents' own parameters.

    Args:
        without_types: modules inside the model whose parameters are left out.
        without_names: patterns that are searched for in lower-case names, in those relative to each submodule too.
    """
    names: list[str] = []
    for child_name, child in model.named_children():
        if not isinstance(child, without_types):
            inner = parameter_names(child, without_types, without_names)
            names += [f"{child_name}.{name}" for name in inner]
    names += list(model._parameters)
    return [name for name in names if not any(pattern.search(name.lower()) for pattern in without_names)]


def decay_groups(
    model: nn.Module, weight_decay: float, decaying: list[str] | None = None
) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters, decaying then not, each in the model's order. Scripts address them by
    their position, so that both exist if one is empty, and if `weight_decay` is 0.

    Args:
        decaying: names in the place of `decay_parameter_names`.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names = set(decay_parameter_names(model) if decaying is None else decaying)
    return [
        {"params": [p for name, p in trainable if name in names], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in names], "weight_decay": 0.0},
    ]
