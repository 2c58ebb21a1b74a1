"""Optimizers of torch that have a learning rate and options of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from windlass.config.plan import OptimizerPlan
from windlass.optim.optimizers.options import Recipe, read_options


def _with_options(cls: type[Optimizer], **known: type) -> Callable[[OptimizerPlan], Recipe]:
    """A function that makes `cls` from a plan, with the options of `optim_args` by name and type."""
    return lambda plan: (cls, {"lr": plan.learning_rate, **read_options(plan.name, plan.options, known)})


sgd = _with_options(torch.optim.SGD, momentum=float, dampening=float, nesterov=bool)
adagrad = _with_options(torch.optim.Adagrad, lr_decay=float, eps=float)  # Duchi et al. 2011
rmsprop = _with_options(  # Hinton, Coursera lecture 6e
    torch.optim.RMSprop, momentum=float, alpha=float, eps=float, centered=bool
)
# bitsandbytes' RMSprop in 32 bits is this formula, without momentum.
rmsprop_bnb = _with_options(torch.optim.RMSprop, alpha=float, eps=float)
