"""The optimizer and the schedule: the defaults of `create_optimizer` and `create_scheduler`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.assemble.engine_values import engine_schedule
from windlass.assemble.resolve import resolve_optimizer
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import CallPlan, OptimizerPlan
from windlass.core.errors import ConfigError, Problem, WindlassError
from windlass.core.logs import get_job_logger
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

logger = get_job_logger(__name__)

__all__ = ["class_and_keywords", "decay_parameter_names", "existing", "new_optimizer", "new_scheduler"]


def class_and_keywords(args: TrainingArguments) -> tuple[type[torch.optim.Optimizer], Any]:
    """The class and keywords of the optimizer that the arguments name, for a script that asks for them alone."""
    return optimizer_factory(resolve_optimizer(args))


def new_optimizer(
    model: nn.Module, plan: OptimizerPlan, given: tuple[Any, dict[str, Any]] | None, decaying: list[str]
) -> torch.optim.Optimizer:
    """An optimizer over the model's parameters. Raises ConfigError if `optim_groups`, `layerwise_lr_decay` or
    `optim_target_modules` do not fit the model or the optimizer.

    Args:
        given: the script's class and keywords, which may hold the parameters, as for adapters; None: those of the plan.
        decaying: names of the parameters that weight decay applies to.
    """
    cls, keywords = optimizer_factory(plan) if given is None else given
    kwargs = dict(keywords)
    # As transformers reads them, the last of several: "model" is what LOMO takes, "optimizer_dict" has an optimizer of
    # each parameter.
    own = [kwargs.pop(key) for key in ("params", "model", "optimizer_dict") if key in kwargs]
    if own:
        if plan.groups or plan.layer_decay != 1:
            fix = "has no effect on an optimizer that is given its own parameters; leave one of them out"
            raise ConfigError(Problem("optim_groups", plan.groups or plan.layer_decay, fix))
        return make_optimizer(own[-1], cls, kwargs)
    groups = arranged(model, cls, parameter_groups(model, plan, decaying))
    if getattr(cls, "projects", False):
        groups = projected_groups(model, groups, plan.targets)
    try:
        optimizer = make_optimizer(groups, cls, kwargs)
    except ValueError as error:
        # Options that do not go together are known to the class alone.
        if given is None and plan.options and not isinstance(error, WindlassError):
            fix = f"{plan.name}: {error}"
            raise ConfigError(Problem("optim_args", dict(plan.options), fix)) from error
        raise
    check_group_options(plan.groups, optimizer.defaults)
    return optimizer


def new_scheduler(
    plan: CallPlan, optimizer: torch.optim.Optimizer | None, total_steps: int, warmup_steps: int
) -> Any:
    """The schedule of the plan, over `total_steps` updates, as a torch scheduler. An optimizer that warms up itself
    gets the warm-up if this schedule has none.
    """
    if optimizer is None:
        raise ConfigError(Problem("optimizer", None, "call create_optimizer() before create_scheduler()"))
    section = engine_schedule(plan, total_steps, warmup_steps)
    if section is not None:
        return make_schedule(optimizer, section)
    schedule = plan.schedule
    warmup = warmup_of_schedule(schedule.name, warmup_steps, optimizer)
    if warmup > total_steps:
        logger.warning(
            "warmup_steps=%d: is longer than the run of %d updates, which never reaches the learning rate; set a "
            "smaller number, or a share of the updates such as 0.1",
            warmup,
            total_steps,
        )
    return build_schedule(
        schedule.name, optimizer, total_steps=total_steps, warmup_steps=warmup, options=schedule.options
    ).exposed  # fmt: skip


def existing(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """Return the optimizer; raise ConfigError if there is none yet."""
    if optimizer is None:
        raise ConfigError(Problem("optimizer", None, "it is created when training starts"))
    return optimizer
