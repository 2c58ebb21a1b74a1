"""From a script's own objects to those that a loop on any number of processes runs with."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from windlass.accelerator.alike import check_prepared_alike
from windlass.accelerator.base import Core
from windlass.accelerator.forward import mix_precision, refuse_raw_forward
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.properties import Properties
from windlass.accelerator.schedule import PreparedSchedule
from windlass.accelerator.stepping import Stepping
from windlass.accelerator.unwrapping import extract_model_from_parallel
from windlass.config.plan import DistPlan
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import INFO, WARNING, get_logger, warn_once
from windlass.data.dealt_loader import DealtLoader
from windlass.data.prepare_loader import LoaderOptions, prepare_loader
from windlass.data.prepared_loader import PreparedLoader
from windlass.data.workers import start_timeout
from windlass.precision.check import check_precision
from windlass.transforms.alone import Alone
from windlass.transforms.compile import apply_compile
from windlass.transforms.ddp import Replicated
from windlass.transforms.offload import has_offloaded_params
from windlass.transforms.strategies import spread
from windlass.transforms.strategy import Strategy, device_of

_log = get_logger(__name__)


class Preparing(Properties, Stepping, Core):
    """The part of `Accelerator` that takes a script's objects and gives back what stands for them."""

    _unit_was_said = False
    _guards: list[Callable[[], None]]

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """What stands for each of the objects from here on, in the order in which they were given.

        Args:
            args: models, optimizers, `DataLoader`s and learning-rate schedules, in any number and order; anything else
                is given back as it is.
            device_placement: for each of them, whether it is moved to this process's device.

        Returns:
            One object for each argument; for a single argument the object itself, else a tuple.

        Raises:
            ConfigError, ModelError, DataError: an object cannot be spread as the settings ask.
            RankMismatchError: settings, models, optimizers or data differ between ranks.
        """
        placement = [None] * len(args) if device_placement is None else list(device_placement)
        if len(placement) != len(args):
            fix = f"needs one entry for each of the {len(args)} objects"
            raise ConfigError(Problem("device_placement", device_placement, fix))
        if self._of_run:
            return self._prepare_for_run(args, placement)
        check_prepared_alike(args, self._settings, self._gang)
        results = list(args)
        # Optimizers first, so that they follow their models; schedules last, because they follow optimizers.
        for index, item in enumerate(args):
            if isinstance(item, torch.optim.Optimizer):
                results[index] = self.prepare_optimizer(item, placement[index])
        models = [index for index, item in enumerate(args) if isinstance(item, nn.Module)]
        for index, model in zip(
            models,
            self._prepare_models([args[i] for i in models], [placement[i] for i in models]),
            strict=True,
        ):
            results[index] = model
        for index, item in enumerate(args):
            if isinstance(item, DataLoader):
                results[index] = self.prepare_data_loader(item, placement[index])
            elif isinstance(item, LRScheduler | PreparedSchedule):
                results[index] = self.prepare_scheduler(item)
        return tuple(results) if len(results) != 1 else results[0]

    def _prepare_for_run(self, objects: Sequence[Any], placement: Sequence[bool | None]) -> Any:
        """Deal loaders to the ranks, unless the Trainer has done so; the rest is the Trainer's to spread."""
        new = [isinstance(item, DataLoader) and not isinstance(item, DealtLoader) for item in objects]
        if not all(isinstance(item, DataLoader) for item in objects):
            warn_once(
                _log,
                "The Trainer spreads its objects itself: trainer.accelerator.prepare deals loaders, and gives other "
                "objects back.",
            )
        if any(new):
            check_prepared_alike(list(itertools.compress(objects, new)), self._settings, self._gang)
        results = [
            self.prepare_data_loader(item, place) if deal else item
            for item, place, deal in zip(objects, placement, new, strict=True)
        ]
        return tuple(results) if len(results) != 1 else results[0]

    # --- models -------------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model to call from here on.

        Args:
            device_placement: whether it is moved to this process's device; None: as the accelerator was told.
            evaluation_mode: it is never trained: every process keeps all of it, and nothing is reduced.

        Raises:
            ConfigError, ModelError: it cannot be spread as the settings ask.
        """
        return self._prepare_models([model], [device_placement], evaluation_mode)[0]

    def _prepare_models(
        self, models: list[nn.Module], placement: list[bool | None], evaluation_mode: bool = False
    ) -> list[nn.Module]:
        new = [m for m in models if self._prepared.strategy_of(m) is None]
        for model in new:
            self._check_model(model)
        placed = {
            id(m): self.device_placement if p is None else p for m, p in zip(models, placement, strict=True)
        }

        def build(model: nn.Module) -> Strategy:
            return self._spread(model, placed[id(model)], evaluation_mode)

        if new:
            self._prepared.replacing_parameters(new, build)
            for optimizer in self._prepared.optimizers:
                bring_state_along(optimizer.optimizer)
        found = [self._prepared.strategy_of(model) for model in models]
        return [strategy.model for strategy in found if strategy is not None]

    def _check_model(self, model: nn.Module) -> None:
        if self.verify_device_map(model) and (self._gang.size > 1 or self._settings.dist.strategy == "fsdp"):
            raise ModelError(
                "a model that was spread over devices with a device_map cannot be spread over processes too: load it "
                "without device_map, or run one process"
            )
        check_precision(self._precision, self.device, model)

    def _spread(self, model: nn.Module, place: bool, evaluation_mode: bool) -> Strategy:
        plan = self._plan_for(model)
        sharding = plan.strategy == "fsdp" and not evaluation_mode
        offloaded = any(map(has_offloaded_params, model.modules()))
        if place and not sharding and not offloaded and not self.verify_device_map(model):
            model.to(self.device)
        if self._precision.compute != "fp32":
            mix_precision(model, functools.partial(self.autocast))
        if self._settings.compile_backend is not None:
            apply_compile(model, self._settings.compile_backend, self._settings.compile_mode)
        trained = any(p.requires_grad for p in model.parameters())
        if evaluation_mode or not (trained or sharding):
            return Alone(model)
        strategy = spread(model, plan, self._gang, self.device if place else device_of(model))
        if isinstance(strategy.model, Replicated):
            self._guards.append(refuse_raw_forward(model, strategy.model))
        return strategy

    def _plan_for(self, model: nn.Module) -> DistPlan:
        """The plan, with modules that the plugin holds as objects to be left whole in it by name."""
        plan, plugin = self._settings.dist, self._settings.fsdp
        names = () if plugin is None else plugin.ignored_names(model.named_modules())
        if not names or plan.shard is None:
            return plan
        return dataclasses.replace(plan, shard=dataclasses.replace(plan.shard, ignored=names))

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model, or a part of it, was spread over several devices with a `device_map`."""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module.

        Args:
            keep_fp32_wrapper: False takes mixed precision off its forward.
            keep_torch_compile: False takes compilation off; wrappers that `torch.compile(model)` made count too.
        """
        strategy = self._prepared.strategy_of(model)
        module: Any = extract_model_from_parallel(
            model if strategy is None else strategy.module, keep_fp32_wrapper, keep_torch_compile
        )
        if not keep_torch_compile:
            module._compiled_call_impl = None  # `module.compile()` leaves no wrapper
        return module  # type: ignore[no-any-return]

    # --- optimizers and schedules -------------------------------------------------------------------------------------

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """An optimizer whose `step` and `zero_grad` keep to the updates of an accumulating loop.

        Args:
            device_placement: its state follows its parameters' device in any case.
        """
        for known in self._prepared.optimizers:
            if optimizer is known or optimizer is known.optimizer:
                return known
        if isinstance(optimizer, PreparedOptimizer):
            raise ModelError(
                "this optimizer was prepared by another accelerator; prepare its own `.optimizer`"
            )
        self._prepared.follow(optimizer)
        bring_state_along(optimizer)
        prepared = PreparedOptimizer(optimizer, self)
        self._prepared.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedSchedule:
        """A schedule that advances with the updates of its optimizer, or of all of them where it is none of theirs."""
        for known in self._prepared.schedules:
            if scheduler is known or scheduler is known.scheduler:
                return known
        followed = getattr(scheduler, "optimizer", None)
        everyone = self._prepared.optimizers
        own = [o for o in everyone if followed is o or followed is o.optimizer]
        unit = self._settings.schedule_unit
        self._say_unit(self.gradient_state.stride)
        prepared = PreparedSchedule(
            scheduler,
            own or everyone,
            self.gradient_state,
            unit or "call",
            self._settings.accumulation.adjust_scheduler,
        )
        self._prepared.schedules.append(prepared)
        return prepared

    def _say_unit(self, stride: int) -> None:
        if self._unit_was_said or self._gang.rank != 0:
            return
        self._unit_was_said = True
        unit = self._settings.schedule_unit
        if unit is None:
            _log.info("Prepared schedules advance whenever their step() is called.")
        elif unit == "optimizer_step":
            _log.info("Prepared schedules count updates that were applied, on any number of processes.")
        else:
            # Where an update is one batch there is nothing that could surprise.
            _log.log(
                WARNING if stride > 1 else INFO,
                "Prepared schedules count batches of the loader as it was before prepare(): every update advances "
                "them by %d. scheduler_unit='optimizer_step' lets them count updates instead.",
                stride,
            )

    # --- data ---------------------------------------------------------------------------------------------------------

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """The loader of this process's part of the data.

        Args:
            device_placement: whether batches are put on this process's device; None: as the accelerator was told.
            slice_fn_for_dispatch: how dispatched batches are cut.

        Raises:
            ConfigError, DataError: it cannot be dealt as the settings ask.
        """
        config = self._settings.loader
        place = self.device_placement if device_placement is None else device_placement
        options = LoaderOptions(
            split_batches=config.split_batches,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            worker_start_timeout=start_timeout(os.environ),
            slice_fn=slice_fn_for_dispatch,
        )
        loader = prepare_loader(
            data_loader,
            world=self._gang.size,
            rank=self._gang.rank,
            device=self.device if place else None,
            options=options,
            gang=self._gang,
        )
        loader.follower = self.gradient_state
        if not self._of_run and not any(loader is known for known in self._prepared.loaders):
            self._prepared.loaders.append(loader)
        return loader

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Refused: sequences are not split over processes."""
        fix = "DeepSpeed's sequence parallelism is not built: prepare the loader, which deals whole sequences"
        raise ConfigError(Problem("deepspeed_ulysses_dl_adapter", type(dl).__name__, fix))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader whose pass begins behind its first `num_batches`, without reading them."""
        from windlass.data.skip import skip_first_batches

        return skip_first_batches(dataloader, num_batches)


def bring_state_along(optimizer: torch.optim.Optimizer) -> None:
    """Move what an optimizer has gathered to where its parameters lie now; counters stay on the host."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.device != parameter.device:
                state[key] = value.to(parameter.device)
