"""A warning if updates are too small to change weights in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.core.logs import get_logger
from windlass.dist.sharded import locals_of

_log = get_logger(__name__)
# Optimizers whose update of an element is at most about the learning rate.
_BOUNDED = frozenset({
    "AdamW", "AdamW8bit", "AdamW4bit", "Lion", "AnyPrecisionAdamW", "StableAdamW", "MuonWithAdamW", "ScheduleFreeAdamW",
    "ScheduleFreeRAdam",
})  # fmt: skip
_HALF = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # the smallest change of 1, relative


def warn_of_lost_updates(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Log a warning if most weights in half precision would be rounded back to what they were, at the learning rates of
    the optimizer's groups and in each update. Reads one number from the device.

    Args:
        name: the optimizer as `optim` names it.
    """
    if type(optimizer).__name__ not in _BOUNDED or getattr(optimizer, "keeps_small_updates", False):
        return
    lost, total = torch.zeros(()), 0
    for group in optimizer.param_groups:
        for weight in _half(group):
            limit = float(group["lr"]) / _HALF[weight.dtype]
            lost += (weight.abs() > limit).sum().cpu()
            total += weight.numel()
    share = float(lost) / max(total, 1)
    if share > 0.5:
        _log.warning(
            "%s: at this learning rate, updates of %.0f %% of the weights in half precision are below their resolution "
            "and will be lost. Load the model in float32 and set bf16=True, or use optim='adamw_anyprecision' with "
            "optim_args='use_kahan_summation=True' or 'bf16_stochastic_round=True'.", name, 100 * share,
        )  # fmt: skip


def _half(group: dict[str, Any]) -> list[Tensor]:
    return [p.detach() for p in locals_of(group["params"]) if p.dtype in _HALF]
