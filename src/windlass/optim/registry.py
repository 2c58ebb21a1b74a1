"""The optimizers by name: one line for each, and for each known name that is not built, why not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.optim.groups import decay_groups
from windlass.optim.optimizers.adafactor import adafactor
from windlass.optim.optimizers.adagrad import adagrad
from windlass.optim.optimizers.adamw import adamw, adamw_fused
from windlass.optim.optimizers.rmsprop import rmsprop
from windlass.optim.optimizers.sgd import sgd

_log = get_logger(__name__)
Recipe = tuple[type[Optimizer], dict[str, Any]]

OPTIMIZERS: dict[str, Callable[[OptimizerPlan], Recipe]] = {
    "adamw_torch": adamw,
    "adamw_torch_fused": adamw_fused,
    "adafactor": adafactor,
    "sgd": sgd,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
}

_LOW_BIT = "optimizers with low-bit or paged state are not built yet"
_LOW_RANK = "optimizers with low-rank gradients are not built yet"
_FUSED_BACKWARD = "optimizers that update inside backward are not built yet"
_SCHEDULE_FREE = "schedule-free optimizers are not built yet"
_OTHER = "it is not built yet"
_FOREIGN = "this device's own optimizers are not built"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused"), _FOREIGN),
    **dict.fromkeys(("adamw_anyprecision", "ademamix", "grokadamw", "stable_adamw", "lion_32bit"), _OTHER),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit"), _LOW_BIT),
    **dict.fromkeys(("ademamix_8bit", "lion_8bit", "paged_adamw_32bit", "paged_adamw_8bit"), _LOW_BIT),
    **dict.fromkeys(("paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit"), _LOW_BIT),
    **dict.fromkeys(("paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), _LOW_BIT),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"), _LOW_RANK),
    **dict.fromkeys(("galore_adamw_layerwise", "galore_adamw_8bit_layerwise"), _LOW_RANK),
    **dict.fromkeys(("galore_adafactor_layerwise", "apollo_adamw_layerwise"), _LOW_RANK),
    **dict.fromkeys(("lomo", "adalomo"), _FUSED_BACKWARD),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _SCHEDULE_FREE),
}


def optimizer_factory(plan: OptimizerPlan) -> Recipe:
    """The class and the keyword arguments that make the optimizer of `plan`, parameters aside.

    Raises:
        ConfigError: the name is unknown or not built, or an option does not belong to it.
    """
    factory = OPTIMIZERS.get(plan.name)
    if factory is None:
        raise ConfigError(_refusal(plan.name))
    return factory(plan)


def build_optimizer(model: nn.Module, plan: OptimizerPlan) -> Optimizer:
    """The optimizer of `plan` over the trainable parameters of `model`, decay groups and all."""
    cls, kwargs = optimizer_factory(plan)
    return make_optimizer(decay_groups(model, plan.weight_decay), cls, kwargs)


def make_optimizer(groups: list[dict[str, Any]], cls: type[Optimizer], kwargs: dict[str, Any]) -> Optimizer:
    """`cls(groups, **kwargs)`; the fused kernel is left out where a parameter's device or type has none.

    Raises:
        ModelError: no parameter is trainable.
    """
    parameters = [p for group in groups for p in group["params"]]
    if not parameters:
        raise ModelError(
            "the model has no parameter that requires gradients, so there is nothing to train; "
            "call requires_grad_(True) on the parts that should learn"
        )
    if kwargs.get("fused") and not _fused_fits(parameters):
        warn_once(
            _log, f"{cls.__name__}: no fused kernel for this model's device or dtype; using the plain one."
        )
        kwargs = {name: value for name, value in kwargs.items() if name != "fused"}
    return cls(groups, **kwargs)


def _fused_fits(parameters: Iterable[torch.Tensor]) -> bool:
    devices = {"cpu", "cuda", "xpu", "mps", "hpu", "mtia"}
    return all(p.device.type in devices and p.is_floating_point() for p in parameters)


def _refusal(name: str) -> Problem:
    built = ", ".join(OPTIMIZERS)
    if name in REFUSED:
        return Problem(
            "optim", name, f"{REFUSED[name]}; use one of {built}, or pass Trainer(optimizers=(...))"
        )
    near = difflib.get_close_matches(str(name), [*OPTIMIZERS, *REFUSED], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return Problem("optim", name, f"{hint}known optimizers: {built}")
