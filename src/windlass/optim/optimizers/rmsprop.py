"""RMSprop (Hinton, Coursera lecture 6e), torch's implementation."""

from __future__ import annotations

from typing import Any

import torch

from windlass.config.plan import OptimizerPlan
from windlass.optim.options import read_options


def rmsprop(plan: OptimizerPlan) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    known = {"momentum": float, "alpha": float, "eps": float, "centered": bool}
    return torch.optim.RMSprop, {"lr": plan.learning_rate, **read_options(plan.name, plan.options, known)}
