"""The optimizers by name: one line for each. Known names without a line are refused in the support table's words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from windlass.config.plan import OptimizerPlan
from windlass.config.support import SECTIONS
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


def make_optimizer(params: Any, cls: Callable[..., Optimizer], kwargs: dict[str, Any]) -> Optimizer:
    """`cls(params, **kwargs)`; the fused kernel is left out where a parameter's device or type has none.

    Args:
        params: groups or parameters; anything else that `cls` takes in their place (a model, say) is handed on unseen.

    Raises:
        ModelError: no parameter is trainable.
    """
    if isinstance(params, (nn.Module, dict)):
        return cls(params, **kwargs)
    params = list(params)
    parameters = list(_flat(params))
    if not parameters:
        raise ModelError(
            "the model has no parameter that requires gradients, so there is nothing to train; "
            "call requires_grad_(True) on the parts that should learn"
        )
    if kwargs.get("fused") and not _fused_fits(parameters):
        warn_once(
            _log,
            f"{getattr(cls, '__name__', cls)}: no fused kernel for this model's device or dtype; using the plain one.",
        )
        kwargs = {name: value for name, value in kwargs.items() if name != "fused"}
    return cls(params, **kwargs)


def _flat(params: list[Any]) -> Iterator[torch.Tensor]:
    """The parameters of groups, of (name, parameter) pairs or of a plain list; single-pass iterables are kept whole."""
    for item in params:
        if isinstance(item, dict):
            item["params"] = (
                [item["params"]] if isinstance(item["params"], torch.Tensor) else list(item["params"])
            )
            yield from _flat(item["params"])
        else:
            yield item[1] if isinstance(item, tuple) else item


def _fused_fits(parameters: Iterable[torch.Tensor]) -> bool:
    devices = {"cpu", "cuda", "xpu", "mps", "hpu", "mtia"}
    return all(p.device.type in devices and p.is_floating_point() for p in parameters)


def _refusal(name: str) -> Problem:
    known = SECTIONS["optim"]
    if name in known:
        return Problem("optim", name, f"{known[name].note}, or pass Trainer(optimizers=(optimizer, None))")
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return Problem("optim", name, f"{hint}known optimizers: {', '.join(OPTIMIZERS)}")
