"""The optimizer and the schedule: the defaults of `create_optimizer` and `create_scheduler`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.assemble.engine_values import engine_schedule
from windlass.assemble.resolve import resolve_engine, resolve_optimizer, resolve_schedule
from windlass.core.errors import ConfigError, Problem
from windlass.optim.groups import (
    arranged,
    check_group_options,
    decay_parameter_names,
    parameter_groups,
)
from windlass.optim.registry import make_optimizer, optimizer_factory
from windlass.optim.schedule import build_schedule, warmup_of_schedule
from windlass.optim.targets import projected_groups
from windlass.zero.library import make_schedule

__all__ = ["class_and_keywords", "decay_parameter_names", "existing", "new_optimizer", "new_scheduler"]


def class_and_keywords(args: Any) -> tuple[type[torch.optim.Optimizer], Any]:
    """The class and keywords of the optimizer that the arguments name."""
    return optimizer_factory(resolve_optimizer(args))


def new_optimizer(
    model: nn.Module, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], args: Any, decaying: list[str]
) -> torch.optim.Optimizer:
    """An optimizer over the model's parameters.

    Args:
        kwargs: may hold the parameters, as they do for adapters.
        decaying: names of the parameters that weight decay applies to.

    Raises:
        ConfigError: `optim_groups`, `layerwise_lr_decay` or `optim_target_modules` do not fit the model or the
            optimizer.
    """
    plan, kwargs = resolve_optimizer(args), dict(kwargs)
    given = [kwargs.pop(key) for key in ("params", "model", "optimizer_dict") if key in kwargs]
    if given:
        if plan.groups or plan.layer_decay != 1:
            fix = "has no effect on an optimizer that is given its own parameters; leave one of them out"
            raise ConfigError(Problem("optim_groups", plan.groups or plan.layer_decay, fix))
        return make_optimizer(given[0], cls, kwargs)
    groups = arranged(model, cls, parameter_groups(model, plan, decaying))
    if getattr(cls, "projects", False):
        groups = projected_groups(model, groups, args.optim_target_modules)
    optimizer = make_optimizer(groups, cls, kwargs)
    check_group_options(plan.groups, optimizer.defaults)
    return optimizer


def new_scheduler(args: Any, optimizer: torch.optim.Optimizer | None, total_steps: int) -> Any:
    """The schedule that the arguments name, over `total_steps` updates, as a torch scheduler. An optimizer that warms
    up itself gets the warm-up if this schedule has none.
    """
    if optimizer is None:
        raise ConfigError(Problem("optimizer", None, "call create_optimizer() before create_scheduler()"))
    section = engine_schedule(args, resolve_engine(args), total_steps)
    if section is not None:
        return make_schedule(optimizer, section)
    plan = resolve_schedule(args, total_steps)
    return build_schedule(
        plan.name, optimizer, total_steps=total_steps, options=plan.options,
        warmup_steps=warmup_of_schedule(plan, optimizer),
    ).exposed  # fmt: skip


def existing(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """Return the optimizer; raise ConfigError if there is none yet."""
    if optimizer is None:
        raise ConfigError(Problem("optimizer", None, "it is created when training starts"))
    return optimizer
