"""The optimizers by name. Names that are known but not built are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from windlass.config.enums import UNBUILT_OPTIMIZERS
from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ConfigError, ModelError, Problem, did_you_mean
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.tensors import is_dense
from windlass.dist.sharded import present
from windlass.optim.optimizers.adafactor import adafactor
from windlass.optim.optimizers.adalomo import adalomo
from windlass.optim.optimizers.adamw import adamw, adamw_fused
from windlass.optim.optimizers.ademamix import ademamix
from windlass.optim.optimizers.anyprecision import anyprecision
from windlass.optim.optimizers.apollo_adamw import apollo_adamw
from windlass.optim.optimizers.bnb import bitsandbytes_library as bitsandbytes_library
from windlass.optim.optimizers.bnb import bnb_adamw, bnb_ademamix, bnb_lion, bnb_rmsprop
from windlass.optim.optimizers.galore_adafactor import galore_adafactor
from windlass.optim.optimizers.galore_adamw import galore_adamw
from windlass.optim.optimizers.galore_adamw_8bit import galore_adamw_8bit
from windlass.optim.optimizers.grokadamw import grokadamw
from windlass.optim.optimizers.lion import lion
from windlass.optim.optimizers.lomo import lomo
from windlass.optim.optimizers.muon import muon
from windlass.optim.optimizers.options import Recipe
from windlass.optim.optimizers.schedule_free import (
    schedule_free_adamw,
    schedule_free_radam,
    schedule_free_sgd,
)
from windlass.optim.optimizers.stable_adamw import stable_adamw
from windlass.optim.optimizers.torch_optimizers import adagrad, rmsprop, rmsprop_bnb, sgd
from windlass.optim.optimizers.torchao_optimizers import torchao_adamw

_log = get_job_logger(__name__)

OPTIMIZERS: dict[str, Callable[[OptimizerPlan], Recipe]] = {
    "adamw_torch": adamw,
    "adamw_torch_fused": adamw_fused,
    "adamw_torch_xla": adamw,  # reads nothing on the host, so it needs no version of its own
    "adafactor": adafactor,
    "sgd": sgd,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "muon": muon,
    "lion_32bit": lion,
    "ademamix": ademamix,
    "stable_adamw": stable_adamw,
    "grokadamw": grokadamw,
    "adamw_anyprecision": anyprecision,
    "schedule_free_adamw": schedule_free_adamw,
    "schedule_free_radam": schedule_free_radam,
    "schedule_free_sgd": schedule_free_sgd,
    "adamw_torch_8bit": torchao_adamw,
    "adamw_torch_4bit": torchao_adamw,
    "adamw_bnb_8bit": bnb_adamw,
    "adamw_8bit": bnb_adamw,
    "paged_adamw_32bit": bnb_adamw,
    "paged_adamw_8bit": bnb_adamw,
    "lion_8bit": bnb_lion,
    "paged_lion_32bit": bnb_lion,
    "paged_lion_8bit": bnb_lion,
    "ademamix_8bit": bnb_ademamix,
    "paged_ademamix_32bit": bnb_ademamix,
    "paged_ademamix_8bit": bnb_ademamix,
    "rmsprop_bnb": rmsprop_bnb,
    "rmsprop_bnb_32bit": rmsprop_bnb,
    "rmsprop_bnb_8bit": bnb_rmsprop,
    "galore_adamw": galore_adamw,
    "galore_adafactor": galore_adafactor,
    "lomo": lomo,
    "adalomo": adalomo,
    "galore_adamw_layerwise": galore_adamw,
    "galore_adafactor_layerwise": galore_adafactor,
    "galore_adamw_8bit": galore_adamw_8bit,
    "galore_adamw_8bit_layerwise": galore_adamw_8bit,
    "apollo_adamw": apollo_adamw,
    "apollo_adamw_layerwise": apollo_adamw,
}


def optimizer_factory(plan: OptimizerPlan) -> Recipe:
    """The class of the optimizer of `plan` and its keyword arguments without parameters. Raises ConfigError if the name
    is unknown or not built, or the optimizer does not have an option.
    """
    factory = OPTIMIZERS.get(plan.name)
    if factory is None:
        raise ConfigError(_refusal(plan.name))
    return factory(plan)


def make_optimizer(params: Any, cls: Callable[..., Optimizer], kwargs: dict[str, Any]) -> Optimizer:
    """`cls(params, **kwargs)`, without `fused` if a parameter's device, dtype or memory has no fused kernel. Raises
    ModelError if no parameter is trainable. `params`: groups or parameters, or a model or dict that `cls` takes in
    their place, which is passed unchecked.
    """
    # Transformers passes "model" or "optimizer_dict" in the keyword arguments of such classes, in the place of
    # groups.
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
            f"{getattr(cls, '__name__', cls)}: no fused kernel for this model's device, dtype or memory; using the "
            "plain one.",
        )
        kwargs = {name: value for name, value in kwargs.items() if name != "fused"}
    return cls(params, **kwargs)


def _flat(params: list[Any]) -> Iterator[torch.Tensor]:
    """The parameters of groups, of (name, parameter) pairs or of a plain list; iterators become lists in place."""
    for item in params:
        if isinstance(item, dict):
            item["params"] = (
                [item["params"]] if isinstance(item["params"], torch.Tensor) else list(item["params"])
            )
            yield from _flat(item["params"])
        else:
            yield item[1] if isinstance(item, tuple) else item


def _fused_fits(parameters: Iterable[torch.Tensor]) -> bool:
    # Those of `torch.utils._foreach_utils._get_fused_kernels_supported_devices` but for plugins' devices, whose
    # kernels are not known here: on a device without one torch raises an error.
    devices = {"cpu", "cuda", "xpu", "mps", "hpu", "mtia"}
    # Kernels read parameters with gaps, such as a slice of another tensor, without these.
    return all(
        p.device.type in devices and p.is_floating_point() and is_dense(p) for p in present(parameters)
    )


def _refusal(name: str) -> Problem:
    if why := UNBUILT_OPTIMIZERS.get(name):
        return Problem("optim", name, f"{why}, or pass Trainer(optimizers=(optimizer, None))")
    return Problem(
        "optim", name, f"known optimizers: {', '.join(OPTIMIZERS)}{did_you_mean(name, OPTIMIZERS)}"
    )
