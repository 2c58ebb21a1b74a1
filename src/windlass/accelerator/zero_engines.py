"""DeepSpeed in a loop of the user's own: what its configuration has instead of objects, and the engine of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.setup import Setup
from windlass.config.deepspeed import AUTO, RunValues, completed, for_engine, in_precision, value_at
from windlass.config.plan import ZeroPlan
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.zero.building import of_plan
from windlass.zero.library import make_schedule
from windlass.zero.zero_executor import ZeroExecutor
from windlass.zero.zero_model import ZeroModel, frozen_model

# Which of DeepSpeed's own kernels to use: PyTorch's are.
_KERNELS = ("torch_adam", "adam_w_mode")


class ZeroEngines:
    """Makes what a configuration of DeepSpeed asks for. The plan of `setup` has it, if DeepSpeed is used."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @property
    def plan(self) -> ZeroPlan | None:
        return self._setup.engines.plan

    # --- optimizers and schedules of the configuration ----------------------------------------------------------------

    def replaced(self, objects: Sequence[Any]) -> list[Any]:
        """`objects` with real optimizers and schedules in place of placeholders. Raises ConfigError if the
        configuration has none, or has one beside an object of the script.
        """
        self._check(objects)
        found = [self._optimizer(item) if isinstance(item, DummyOptim) else item for item in objects]
        return [self._schedule(item) if isinstance(item, DummyScheduler) else item for item in found]

    def _check(self, objects: Sequence[Any]) -> None:
        plan = self.plan
        config = {} if plan is None else plan.config
        for item in objects:
            if isinstance(item, DummyOptim) and "optimizer" not in config:
                fix = "represents the optimizer of a DeepSpeed configuration, which has none; pass a real one"
                raise ConfigError(Problem("DummyOptim", None, fix))
            # An earlier call may have made it of a placeholder.
            prepared = isinstance(item, PreparedOptimizer) and not item.is_free
            if isinstance(item, torch.optim.Optimizer) and not prepared and "optimizer" in config:
                raise ConfigError(self._both("optimizer", item, "DummyOptim"))
            if isinstance(item, LRScheduler) and "scheduler" in config:
                raise ConfigError(self._both("scheduler", item, "DummyScheduler"))
            needs = isinstance(item, DummyScheduler) and item.lr_scheduler_callable is None
            if needs and "scheduler" not in config:
                fix = "represents the schedule of a DeepSpeed configuration, which has none; pass a real one"
                raise ConfigError(Problem("DummyScheduler", None, fix))

    def _both(self, section: str, item: Any, placeholder: str) -> Problem:
        """The configuration has what the script passes too."""
        assert self.plan is not None, "the caller looked"
        kind = self.plan.config[section].get("type")
        fix = f"contradicts {type(item).__name__} of the script: pass a {placeholder}, or remove it there"
        return Problem(f"{self.plan.origin}.{section}.type", kind, fix)

    def _optimizer(self, item: DummyOptim) -> torch.optim.Optimizer:
        section = self._section(
            "optimizer",
            {
                "optimizer.params.lr": (item.lr, "DummyOptim(lr=)"),
                "optimizer.params.weight_decay": (item.weight_decay, "DummyOptim(weight_decay=)"),
                "optimizer.params.betas": (item.kwargs.get("betas", (0.9, 0.999)), "DummyOptim(betas=)"),
                "optimizer.params.eps": (item.kwargs.get("eps", 1e-8), "DummyOptim(eps=)"),
            },
        )
        read = {name: value for name, value in section.get("params", {}).items() if name not in _KERNELS}
        options = {"lr": item.lr, "weight_decay": item.weight_decay, **item.kwargs, **read}
        # The only kind: a configuration that names another one is refused when it is read.
        item.made = torch.optim.AdamW(item.params, **options)
        return item.made

    def _schedule(self, item: DummyScheduler) -> Any:
        optimizer = item.optimizer.made if isinstance(item.optimizer, DummyOptim) else item.optimizer
        if optimizer is None:
            fix = "represents the schedule of a DummyOptim that was not prepared: prepare that with it, or before it"
            raise ConfigError(Problem("DummyScheduler", None, fix))
        if item.lr_scheduler_callable is not None:
            return item.lr_scheduler_callable(optimizer)
        peak = max(group["lr"] for group in optimizer.param_groups)
        section = self._section(
            "scheduler",
            {
                "scheduler.params.warmup_max_lr": (peak, "the optimizer's lr"),
                "scheduler.params.warmup_num_steps": (
                    item.warmup_num_steps,
                    "DummyScheduler(warmup_num_steps=)",
                ),
                "scheduler.params.total_num_steps": (
                    item.total_num_steps,
                    "DummyScheduler(total_num_steps=)",
                ),
            },
        )
        return make_schedule(optimizer, section)

    def _section(self, name: str, values: dict[str, tuple[Any, str]]) -> dict[str, Any]:
        """A section of the configuration, with these values in place of "auto" and of nothing else."""
        assert self.plan is not None, "checked before"
        own = {name: self.plan.config[name]}
        open_paths = RunValues({path: pair for path, pair in values.items() if value_at(own, path) == AUTO})
        config, problems = completed(own, self.plan.origin, open_paths)
        refuse(problems)
        section: dict[str, Any] = config[name]
        return section

    # --- engines ------------------------------------------------------------------------------------------------------

    def engine(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> ZeroExecutor:
        """Divide `model` and `optimizer` among ranks. Collective."""
        assert self.plan is not None, "the caller looked"
        settings = self._setup.settings
        values = {
            "gradient_accumulation_steps": (
                settings.accumulation.num_steps or 1,
                "gradient_accumulation_steps",
            ),
            "bf16.enabled": (settings.precision.compute == "bf16", "mixed_precision"),
            "fp16.enabled": (settings.precision.compute == "fp16", "mixed_precision"),
            "gradient_clipping": (0.0, "its default"),
        }
        config = {
            name: value
            for name, value in self.plan.config.items()
            # The engine gets an optimizer as an object, and its sizes from `for_engine`; the loop steps the schedule.
            if name not in ("optimizer", "scheduler", "train_batch_size", "train_micro_batch_size_per_gpu")
        }
        clipping = config.get("gradient_clipping")
        if clipping != "auto":
            del values["gradient_clipping"]
        width = getattr(getattr(model, "config", None), "hidden_size", None)
        config, problems = completed(config, self.plan.origin, RunValues(values, width))
        refuse(problems)
        config = in_precision(config, settings.precision.compute)
        plan = dataclasses.replace(
            self.plan, config=for_engine(config, micro=1), max_norm=config.get("gradient_clipping") or None
        )
        return ZeroExecutor(model, optimizer, plan, device, self._setup.all_ranks.over("loss"))

    def divide_new_models(self) -> None:
        """Let models of transformers be divided while they are built, if the selected configuration says so."""
        setup = self._setup
        # The selection outlives the accelerator, and must not keep its models.
        precision, device, all_ranks = setup.settings.precision, setup.device, setup.all_ranks

        def divide(plan: ZeroPlan | None) -> Any:
            return of_plan(precision, plan, lambda: (device, all_ranks.over("loss")))

        if self.plan is not None:
            setup.engines.divide_new_models(divide)

    def frozen(self, model: nn.Module, device: torch.device) -> ZeroModel:
        """Divide the parameters of a model that is not trained. Collective."""
        assert self.plan is not None, "the caller looked"
        compute = self._setup.settings.precision.compute
        return frozen_model(model, self.plan, compute, device, self._setup.all_ranks.over("loss"))


class DummyOptim:
    """Represents the optimizer of a DeepSpeed configuration; `accelerator.prepare` returns that one.

    Args:
        params: the parameters, or groups of them.
        lr, weight_decay: the values of "auto" in the configuration.
        kwargs: further options of the optimizer.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs
        self.made: torch.optim.Optimizer | None = None  # what `prepare` made of it


class DummyScheduler:
    """Represents the schedule of a DeepSpeed configuration; `accelerator.prepare` returns that one.

    Args:
        optimizer: a `DummyOptim`, or an optimizer.
        total_num_steps, warmup_num_steps: the values of "auto" in the configuration, in the unit of prepared schedules.
        lr_scheduler_callable: makes the schedule of an optimizer, instead of the configuration.
        kwargs: no effect.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.total_num_steps = optimizer, total_num_steps
        self.warmup_num_steps, self.lr_scheduler_callable, self.kwargs = (
            warmup_num_steps,
            lr_scheduler_callable,
            kwargs,
        )
