"""The optimizer and the schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.assemble.resolve import resolve_optimizer
from windlass.core.errors import ConfigError, Problem
from windlass.optim.groups import decay_groups, decay_parameter_names
from windlass.optim.registry import make_optimizer, optimizer_factory
from windlass.optim.schedule import build_schedule
from windlass.trainer.base import TrainerBase


class OptimizationMixin(TrainerBase):
    """`create_optimizer_and_scheduler` and its parts; each may be overridden."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `self.optimizer` and `self.lr_scheduler`, where they are not set yet."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Set and return `self.optimizer`; one that is there already is kept."""
        if self.optimizer is None:
            target = self.model if model is None else model
            if self.optimizer_cls_and_kwargs is not None:
                cls, kwargs = self.optimizer_cls_and_kwargs
                kwargs = dict(kwargs)
            else:
                cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, target)
            groups = decay_groups(target, self.args.weight_decay, self.get_decay_parameter_names(target))
            # The keywords may bring their own parameters, as they do for adapters.
            groups = kwargs.pop("params", kwargs.pop("model", kwargs.pop("optimizer_dict", groups)))
            self.optimizer = make_optimizer(groups, cls, kwargs)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Set and return `self.lr_scheduler`; one that is there already is kept."""
        if self.lr_scheduler is None:
            target = self.optimizer if optimizer is None else optimizer
            if target is None:
                raise ConfigError(
                    Problem("optimizer", None, "call create_optimizer() before create_scheduler()")
                )
            plan = resolve_optimizer(self.args, num_training_steps)
            schedule = build_schedule(
                plan.schedule,
                target,
                total_steps=num_training_steps,
                warmup_steps=plan.warmup_steps,
                options=plan.schedule_options,
            )
            self.lr_scheduler = schedule.exposed
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: Any, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], Any]:
        """The optimizer's class and keywords that these arguments ask for."""
        return optimizer_factory(resolve_optimizer(args, max(args.max_steps, 0)))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: all but norms and biases."""
        return decay_parameter_names(model)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group, as it stands."""
        if self.optimizer is None:
            raise ConfigError(Problem("optimizer", None, "it is created when training starts"))
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """The parameters of each group; with `param`, the one group that holds it (None where none does).

        Raises:
            ConfigError: there is no optimizer yet.
        """
        if self.optimizer is None:
            raise ConfigError(Problem("optimizer", None, "it is created when training starts"))
        groups = self.optimizer.param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(p is param for p in group["params"])), None)

    def get_num_trainable_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def _get_learning_rate(self) -> float:
        """The learning rate of the first group, as a report shows it."""
        return float(self.get_learning_rates()[0])
