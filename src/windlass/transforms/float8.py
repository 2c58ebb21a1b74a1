"""Linear layers that multiply in 8-bit floats (arXiv:2209.05433), through torchao.

Weights, their gradients and all states keep their dtype: inputs, weights and gradients are scaled and rounded to float8
for each matrix product. So state dicts have the same names and values as without it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from windlass.config.plan import Float8Plan
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.optional import is_imported, require

_log = get_job_logger(__name__)
_MULTIPLE = 16  # of both sizes of a layer: the kernels need it
_ENDS = "first or last of the model"


def apply_float8(model: nn.Module, plan: Float8Plan) -> None:
    """Convert linear layers of `model` in place; their parameters stay the same objects.

    The first and the last linear layer keep their dtype, because rounding them costs most accuracy, and so do layers
    whose sizes are not multiples of 16 and subclasses of `nn.Linear`, which have a product of their own. A second call
    changes nothing. Raises ConfigError if no layer can be converted, and MissingDependencyError if torchao is not
    installed.
    """
    library = require("torchao.float8", "train in float8")
    if any(_is_converted(module) for module in model.modules()):
        return
    reasons = dict(_reasons(model, plan.selects))
    kept = Counter(reason for reason in reasons.values() if reason)
    if len(reasons) == kept.total():
        found = ", ".join(f"{count} {reason}" for reason, count in kept.items()) or "it has none"
        fix = f"{type(model).__name__} has no linear layer that can multiply in float8 ({found}); use bf16"
        raise ConfigError(Problem("mixed_precision", "fp8", fix))
    library.convert_to_float8_training(
        model, config=_config(library, plan), module_filter_fn=lambda _, name: reasons.get(name) == ""
    )
    for module in model.modules():
        if _is_converted(module):
            module.register_forward_pre_hook(_follow_autocast)
    left = "; ".join(f"{count} {reason}" for reason, count in kept.items())
    _log.info(
        "float8: %d of %d linear layers are converted%s%s",
        len(reasons) - kept.total(),
        len(reasons),
        f" (left as they are: {left})" if left else "",
        ", emulated: slower than without it" if plan.emulate else "",
    )


def _is_converted(module: nn.Module) -> bool:
    if not is_imported("torchao"):
        return False
    return isinstance(module, require("torchao.float8.float8_linear", "train in float8").Float8Linear)


def _reasons(model: nn.Module, selects: Callable[[Any, str], bool] | None) -> Iterator[tuple[str, str]]:
    """(name, why it is not converted) of each linear layer; the reason is empty for those that are."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    ends = {*list(layers)[:1], *list(layers)[-1:]}
    for name, layer in layers.items():
        if type(layer) is not nn.Linear:
            yield name, "of another class"
        elif layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
            yield name, f"with a size that is not a multiple of {_MULTIPLE}"
        elif selects is not None:
            yield name, "" if selects(layer, name) else "excluded by the script"
        else:
            yield name, _ENDS if name in ends else ""


def _config(library: Any, plan: Float8Plan) -> Any:
    """torchao's configuration. Parameters are never of its own class, which optimizers and checkpoints do not know."""
    if plan.config is not None:
        return dataclasses.replace(plan.config, enable_fsdp_float8_all_gather=False)
    made = library.Float8LinearConfig.from_recipe_name(plan.recipe)
    return dataclasses.replace(made, emulate=plan.emulate, pad_inner_dim=plan.pad)


def _follow_autocast(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Cast the input as autocast casts that of any linear layer: torchao's layers know that of CUDA alone."""
    kind = arguments[0].device.type if arguments else "cuda"
    if kind == "cuda" or not torch.is_autocast_enabled(kind):
        return None
    return (arguments[0].to(torch.get_autocast_dtype(kind)), *arguments[1:])
