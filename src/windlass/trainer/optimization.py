"""The optimizer and the schedule: the defaults of `create_optimizer` and `create_scheduler`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.assemble.resolve import resolve_optimizer
from windlass.core.errors import ConfigError, Problem
from windlass.optim.groups import decay_groups, decay_parameter_names
from windlass.optim.registry import make_optimizer, optimizer_factory
from windlass.optim.schedule import build_schedule
from windlass.optim.targets import projected_groups

__all__ = ["class_and_keywords", "decay_parameter_names", "existing", "new_optimizer", "new_scheduler"]


def class_and_keywords(args: Any) -> tuple[type[torch.optim.Optimizer], Any]:
    """The class and keywords of the optimizer that the arguments name."""
    return optimizer_factory(resolve_optimizer(args, max(args.max_steps, 0)))


def new_optimizer(
    model: nn.Module, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], weight_decay: float,
    decaying: list[str], targets: str | list[str] | None = None,
) -> torch.optim.Optimizer:  # fmt: skip
    """An optimizer over the model's parameters.

    Args:
        kwargs: may hold the parameters, as they do for adapters.
        decaying: names of the parameters that weight decay applies to.
        targets: `optim_target_modules`, for optimizers that project gradients.
    """
    kwargs = dict(kwargs)
    groups = decay_groups(model, weight_decay, decaying)
    if getattr(cls, "projects", False):
        groups = projected_groups(model, groups, targets)
    groups = kwargs.pop("params", kwargs.pop("model", kwargs.pop("optimizer_dict", groups)))
    return make_optimizer(groups, cls, kwargs)


def new_scheduler(args: Any, optimizer: torch.optim.Optimizer | None, total_steps: int) -> Any:
    """The schedule that the arguments name, over `total_steps` updates, as a torch scheduler."""
    if optimizer is None:
        raise ConfigError(Problem("optimizer", None, "call create_optimizer() before create_scheduler()"))
    plan = resolve_optimizer(args, total_steps)
    schedule = build_schedule(
        plan.schedule, optimizer, total_steps=total_steps, warmup_steps=plan.warmup_steps,
        options=plan.schedule_options,
    )  # fmt: skip
    return schedule.exposed


def existing(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """Return the optimizer; raise ConfigError if there is none yet."""
    if optimizer is None:
        raise ConfigError(Problem("optimizer", None, "it is created when training starts"))
    return optimizer
