"""Adagrad (Duchi et al. 2011), torch's implementation."""

from __future__ import annotations

from typing import Any

import torch

from windlass.config.plan import OptimizerPlan
from windlass.optim.options import read_options


def adagrad(plan: OptimizerPlan) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    known = {"lr_decay": float, "eps": float}
    return torch.optim.Adagrad, {"lr": plan.learning_rate, **read_options(plan.name, plan.options, known)}
