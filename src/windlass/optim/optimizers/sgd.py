"""Stochastic gradient descent, torch's implementation."""

from __future__ import annotations

from typing import Any

import torch

from windlass.config.plan import OptimizerPlan
from windlass.optim.options import read_options


def sgd(plan: OptimizerPlan) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    known = {"momentum": float, "dampening": float, "nesterov": bool}
    return torch.optim.SGD, {"lr": plan.learning_rate, **read_options(plan.name, plan.options, known)}
