"""A warning if updates are too small to change weights in bfloat16. Weights in float16 are refused."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.logs import get_job_logger
from windlass.dist.sharded import locals_of

_log = get_job_logger(__name__)
# Optimizers whose update of an element is at most about the learning rate.
_BOUNDED = frozenset((
    "AdamW", "AdamW8bit", "AdamW4bit", "Lion", "AnyPrecisionAdamW", "StableAdamW", "MuonWithAdamW", "ScheduleFreeAdamW",
    "ScheduleFreeRAdam",
))  # fmt: skip
_SMALLEST = torch.finfo(torch.bfloat16).eps / 4  # below this share, the update of any number is rounded away


def warn_of_lost_updates(optimizer: torch.optim.Optimizer) -> None:
    """Log a warning if weights in bfloat16 would lose small updates: always if the size of updates is unknown
    before they are made, else if most weights lose theirs at the learning rate. Reads one number of each weight from
    its device.
    """
    if getattr(optimizer, "keeps_small_updates", False):
        return
    weights = [
        # A schedule that warms up has set "lr" to 0 already.
        (weight.detach(), float(group.get("initial_lr", group["lr"])))
        for group in optimizer.param_groups
        for weight in locals_of(group["params"])
        if weight.dtype is torch.bfloat16
    ]
    if not weights:
        return
    lost = ""
    if type(optimizer).__name__ in _BOUNDED:
        share = _share_lost(weights)
        if share <= 0.5:
            return
        lost = f" At this learning rate, updates of {100 * share:.0f} % of them are."
    _log.warning(
        "%d trained parameters are bfloat16: an update smaller than about %.2g of a weight is rounded away.%s Load the "
        "model with dtype=torch.float32 (bf16=True still computes in bfloat16), or use optim='adamw_anyprecision' with "
        "optim_args='use_kahan_summation=True' or 'bf16_stochastic_round=True'.",
        len(weights),
        2 * _SMALLEST,
        lost,
    )


def _share_lost(weights: list[tuple[Tensor, float]]) -> float:
    """The share of all elements whose updates are lost if each is as large as the learning rate."""
    lost = torch.zeros(())
    for weight, lr in weights:
        # An update of `lr` is surely lost if it is below this share of the weight, so counts are lower bounds.
        lost += (weight.abs() > lr / _SMALLEST).sum().cpu()
    return float(lost) / max(sum(weight.numel() for weight, _ in weights), 1)
