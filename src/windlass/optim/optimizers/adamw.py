"""AdamW (Loshchilov & Hutter, arXiv:1711.05101), torch's implementations."""

from __future__ import annotations

import torch

from windlass.config.plan import OptimizerPlan
from windlass.optim.optimizers.options import Recipe, read_options


def adamw(plan: OptimizerPlan) -> Recipe:
    """The default loop over tensors (`foreach` on accelerators)."""
    options = read_options(plan.name, plan.options, {"amsgrad": bool})
    kwargs = {"lr": plan.learning_rate, "betas": plan.betas, "eps": plan.epsilon, **options}
    return torch.optim.AdamW, kwargs


def adamw_fused(plan: OptimizerPlan) -> Recipe:
    """One kernel for all tensors, on every device that has it."""
    cls, kwargs = adamw(plan)
    return cls, {**kwargs, "fused": True}
