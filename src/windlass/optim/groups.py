"""Which parameters decay: all but norms and biases."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

# By name as well as by type: models bring their own norm classes (LlamaRMSNorm, T5LayerNorm, ...).
_KEPT_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # every batch and instance norm
)


def decay_parameter_names(model: nn.Module, norms: tuple[type[nn.Module], ...] = _NORMS) -> list[str]:
    """Names of the parameters that weight decay applies to, submodules before their parents' own parameters.

    Left out: parameters inside norm layers (torch's own types, or those given), and those whose name says bias or norm.
    """
    names: list[str] = []
    for child_name, child in model.named_children():
        if isinstance(child, norms):
            continue
        names += [f"{child_name}.{name}" for name in decay_parameter_names(child, norms)]
    names += list(model._parameters)
    return [name for name in names if not _KEPT_NAMES.search(name.lower())]


def decay_groups(
    model: nn.Module, weight_decay: float, decaying: list[str] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups, decaying then not, each in the model's order; only parameters that require gradients.

    Without weight decay there is nothing to tell apart and one group holds all: a fused optimizer launches its kernel
    once for each group. `decaying` replaces the names of `decay_parameter_names`.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if weight_decay == 0.0:
        return [{"params": [p for _, p in trainable], "weight_decay": 0.0}]
    names = set(decay_parameter_names(model) if decaying is None else decaying)
    return [
        {"params": [p for name, p in trainable if name in names], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in names], "weight_decay": 0.0},
    ]
