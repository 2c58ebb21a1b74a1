"""Prepare models, optimizers, schedules and loaders for any number of processes, which all prepare the same."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.engine import LoopEngine
from windlass.accelerator.executors import parameters_of
from windlass.accelerator.forward import (
    extract_model_from_parallel,
    mix_precision,
    refuse_raw_forward,
    restore_forward,
)
from windlass.accelerator.offloaded_weights import has_offloaded_params
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.accelerator.setup import LoopSettings, Setup, autocast_of
from windlass.accelerator.zero_engines import ZeroEngines
from windlass.checkpoint.optimizer_state import sparse_momentum
from windlass.config.deepspeed import stage_of
from windlass.config.plan import DistPlan
from windlass.core.errors import ConfigError, ModelError, Problem, refuse
from windlass.core.logs import INFO, WARNING, get_logger, warn_once
from windlass.core.module_state import bare
from windlass.data.prepare_loader import prepare_loader
from windlass.data.prepared_loader import PreparedLoader
from windlass.data.workers import start_timeout
from windlass.dist.alike import check_alike, model_facts, optimizer_facts
from windlass.dist.gang import Gang
from windlass.optim.resolution import warn_of_lost_updates
from windlass.precision.check import check_weights
from windlass.transforms.alone import Alone
from windlass.transforms.compile import apply_compile
from windlass.transforms.ddp import Replicated
from windlass.transforms.float8 import apply_float8
from windlass.transforms.placing import to_device
from windlass.transforms.spmd import SplitOverDevices, start_evaluations
from windlass.transforms.strategies import spread
from windlass.transforms.strategy import Strategy, device_of
from windlass.zero.library import is_divided

_log = get_logger(__name__)


def check_overrides(accelerator: object) -> None:
    """Raise ConfigError for methods that a script overrides, or assigns to the class, and `prepare` would not call."""
    parts = ("prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader", "_prepare_one")
    fix = "`prepare` builds what belongs together at once and would never call it; override `prepare`"
    present = {name: getattr(accelerator, name, None) for name in parts}
    refuse(Problem(n, "overridden", fix) for n, method in present.items() if not _is_ours(method))


def _is_ours(method: Any) -> bool:
    # Not `__module__` of a function, which `functools.wraps` copies from the method that a script wraps.
    module = getattr(method, "__globals__", {}).get("__name__") or getattr(method, "__module__", None)
    return method is None or str(module).startswith("windlass.")


class Preparer:
    """Prepares the objects of a script; see the methods of `Accelerator`."""

    def __init__(
        self, setup: Setup, accumulation: AccumulationState, prepared: Prepared, engine: LoopEngine
    ) -> None:
        self._setup, self._settings, self._all_ranks = setup, setup.settings, setup.all_ranks
        self._accumulation, self._prepared, self._engine = accumulation, prepared, engine
        self._unit_was_logged = False
        self.zero = ZeroEngines(setup)

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Return the objects to use instead of `args`, in the same order. Collective."""
        placement = [None] * len(args) if device_placement is None else list(device_placement)
        if len(placement) != len(args):
            fix = f"needs one entry for each of the {len(args)} objects"
            raise ConfigError(Problem("device_placement", device_placement, fix))
        args = tuple(self.zero.replaced(args))
        new = self._not_kept(args)
        if len(new) < len(args):
            warn_once(
                _log,
                "The Trainer prepares its own model, optimizer and schedule: trainer.accelerator.prepare returns them "
                "unchanged.",
            )
        if new:
            objects = [args[index] for index in new]
            check_prepared_alike(objects, self._settings, self._setup.dist, self._all_ranks)
        results = list(args)
        # Optimizers first, so that they follow their models; schedules last, because they follow optimizers.
        for index in new:
            if isinstance(args[index], torch.optim.Optimizer):
                results[index] = self.prepare_optimizer(args[index])
        models = [index for index in new if isinstance(args[index], nn.Module)]
        spread_models = self._prepare_models([args[i] for i in models], [placement[i] for i in models])
        for index, model in zip(models, spread_models, strict=True):
            results[index] = model
        for index in new:
            if isinstance(args[index], DataLoader):
                results[index] = self.prepare_data_loader(args[index], placement[index])
            elif isinstance(args[index], LRScheduler | PreparedSchedule) or self._is_engines(args[index]):
                results[index] = self.prepare_scheduler(args[index])
        self._warn_of_sparse_momentum()
        return tuple(results) if len(results) != 1 else results[0]

    def _warn_of_sparse_momentum(self) -> None:
        """Say now what would fail the first save; a loop that saves nothing may go on."""
        for optimizer in self._prepared.optimizers:
            for strategy in self._prepared.strategies:
                for problem in sparse_momentum(optimizer.optimizer, strategy.module):
                    warn_once(_log, f"save_state will fail: {problem}")

    def _is_engines(self, item: Any) -> bool:
        """Return True for a schedule of DeepSpeed's, which is not one of PyTorch's."""
        return self.zero.plan is not None and type(item).__module__ == "deepspeed.runtime.lr_schedules"

    def _not_kept(self, args: Sequence[Any]) -> list[int]:
        """Indices of the objects that the engine does not prepare itself."""
        keeps, updates = self._engine.keeps, self._prepared.updates
        modules = [item for item in args if isinstance(item, nn.Module) and not keeps(item, updates)]
        return [i for i, item in enumerate(args) if not keeps(item, lambda o: updates(o, modules))]

    # --- models -------------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Return the model to call instead of `model`. Collective."""
        if not self._not_kept([model]):
            return model
        return self._prepare_models([model], [device_placement], evaluation_mode)[0]

    def _prepare_models(
        self, models: list[nn.Module], placement: list[bool | None], evaluation_mode: bool = False
    ) -> list[nn.Module]:
        # A wrapper that another accelerator made is left; around it, a second one would reduce the gradients again.
        models = [
            m.module if isinstance(m, Replicated) and self._prepared.strategy_of(m) is None else m
            for m in models
        ]
        # By identity: a script may pass one model under two names.
        new = list({id(m): m for m in models if not self._is_prepared(m)}.values())
        for model in new:
            self._check_model(model)
        placed = {
            id(m): self._settings.device_placement if p is None else p
            for m, p in zip(models, placement, strict=True)
        }

        for model in new:
            self._place(model, placed[id(model)], evaluation_mode)

        def build(model: nn.Module) -> Strategy:
            strategy = self._spread(model, placed[id(model)], evaluation_mode)
            # Afterwards: layouts compare results in the precision of the weights. Under DeepSpeed too: autocast casts
            # the inputs of its half-precision model.
            restore_forward(model)  # of an accelerator before this one, perhaps in another precision
            if self._settings.precision.compute != "fp32":
                mix_precision(model, partial(autocast_of, self._settings, self._setup.device))
            return strategy

        if new:
            self._prepared.spread(new, build)
            for optimizer in self._prepared.optimizers:
                bring_state_along(optimizer.optimizer)
        found = [(model, self._prepared.strategy_of(model)) for model in models]
        # What the script compiled after it was prepared stays what to call.
        prepared: list[Any] = [model if strategy is None else strategy.model for model, strategy in found]
        for model in prepared:
            model._is_accelerate_prepared = True  # scripts look for it
        return prepared

    def _is_prepared(self, model: nn.Module) -> bool:
        """Return True for a prepared model, also within `torch.compile`."""
        return any(self._prepared.strategy_of(known) is not None for known in (model, bare(model)))

    def _check_model(self, model: nn.Module) -> None:
        if has_device_map(model) and (self._all_ranks.size > 1 or self._setup.is_fsdp2):
            raise ModelError(
                "a model that is spread over devices by a device_map cannot be spread over processes too: load it "
                "without device_map, or run one process"
            )

    def _spread(self, model: nn.Module, place: bool, evaluation_mode: bool) -> Strategy:
        plan = self._plan_for(model)
        if plan.pipeline is not None:
            fix = (
                "needs all micro-batches of an update at once, and a model of `prepare` gets one at a time: a loop of "
                "your own would see a loss on the last process alone, and compute while all others wait. Use Trainer, "
                "SFTTrainer or DPOTrainer, or windlass.prepare_pippy for inference"
            )
            raise ConfigError(Problem("pp_size", plan.pipeline.size, fix))
        sharding = plan.strategy == "fsdp" and not evaluation_mode
        float8 = self._settings.precision.float8
        # In the order of a run (`assemble.build`): compiled and sharded are the converted layers.
        if float8 is not None and not evaluation_mode and any(p.requires_grad for p in model.parameters()):
            apply_float8(model, float8)
        if self._settings.compile is not None:
            apply_compile(model, self._settings.compile)
        trained = any(p.requires_grad for p in model.parameters())
        device = self._setup.device if place else device_of(model)
        zero = self.zero.plan
        divides = zero is not None and stage_of(zero.config) == 3
        if divides and (is_divided(model) if evaluation_mode else not trained):
            return self.zero.frozen(model, device)
        if evaluation_mode or not (trained or sharding):
            return Alone(model)
        if zero is not None:
            return self._divide(model, device)
        loss_ranks, in_backward = self._all_ranks.over("loss"), self._prepared.updates_in_backward(model)
        strategy = spread(model, plan, loss_ranks, device, in_backward)
        if isinstance(strategy.model, Replicated):
            self._prepared.guards.append(refuse_raw_forward(model, strategy.model))
        if isinstance(strategy, SplitOverDevices):
            self._prepared.guards.append(start_evaluations(model))
        return strategy

    def _place(self, model: nn.Module, place: bool, evaluation_mode: bool) -> None:
        """Move the model to this process's device, unless sharding does it or its parts have devices of their own."""
        # XLA's compiler splits parameters that are on the device already; see `SplitOverDevices`.
        sharding = self._setup.is_fsdp2 and not evaluation_mode and self._setup.device.type != "xla"
        offloaded = any(map(has_offloaded_params, model.modules()))
        if place and not sharding and not offloaded and not has_device_map(model):
            to_device(model, self._setup.device)

    def _divide(self, model: nn.Module, device: torch.device) -> Strategy:
        """Give the model and its optimizer to DeepSpeed's engine."""
        own = set(map(id, model.parameters()))
        found = [o for o in self._prepared.optimizers if any(id(p) in own for p in parameters_of(o))]
        if len(found) != 1 or self._prepared.executors.engine is not None:
            raise ModelError(
                f"under DeepSpeed one call of `prepare` takes the trained model and its one optimizer; "
                f"{len(found)} optimizers of this model were given"
                + (", and a model is trained already" if self._prepared.executors.engine is not None else "")
            )
        optimizer = found[0].optimizer
        make = partial(self.zero.engine, model, optimizer, device)
        return self._prepared.executors.use_engine(found[0], make).strategy

    def _plan_for(self, model: nn.Module) -> DistPlan:
        """The plan, with the names of the modules that the plugin excludes from sharding as objects."""
        plan, plugin = self._setup.dist, self._settings.fsdp
        names = () if plugin is None else plugin.ignored_names(model.named_modules())
        if not names or plan.shard is None:
            return plan
        return dataclasses.replace(plan, shard=dataclasses.replace(plan.shard, ignored=names))

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module."""
        strategy = self._prepared.strategy_of(model)
        inner = model if strategy is None else strategy.module
        module: Any = extract_model_from_parallel(inner, keep_fp32_wrapper, keep_torch_compile)
        if not keep_torch_compile:
            module._compiled_call_impl = None  # set by `module.compile()`, which makes no wrapper
        return module  # type: ignore[no-any-return]

    # --- optimizers and schedules -------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Return an optimizer whose `step` and `zero_grad` act only in the last micro-batch of an update. Raises
        ModelError for one that another accelerator holds.
        """
        for known in self._prepared.optimizers:
            if optimizer is known or optimizer is known.optimizer:
                return known
        if isinstance(optimizer, PreparedOptimizer):
            if not optimizer.is_free:
                raise ModelError(
                    "this optimizer was prepared by another accelerator, which still updates it: call `free_memory()` "
                    "of that one first"
                )
            optimizer = optimizer.optimizer
        if self.zero.plan is None:  # DeepSpeed updates fp32 values of weights in few bits
            check_weights(optimizer)
        warn_of_lost_updates(optimizer)
        self._prepared.follow(optimizer)
        bring_state_along(optimizer)
        executors = self._prepared.executors
        prepared = PreparedOptimizer(optimizer, self._accumulation, executors.update)
        self._prepared.optimizers.append(prepared)
        executors.add(prepared)
        for schedule in self._prepared.schedules:
            schedule.follow(self._prepared.optimizers)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedSchedule:
        """Return a schedule that advances with the updates of its optimizer, or of all if it was not prepared."""
        for known in self._prepared.schedules:
            if scheduler is known or scheduler is known.scheduler:
                return known
        if isinstance(scheduler, PreparedSchedule):  # of another accelerator, whose updates it would count
            scheduler = scheduler.scheduler
        unit = self._settings.schedule_unit
        self._log_unit(unit)
        prepared = PreparedSchedule(
            scheduler,
            self._prepared.optimizers,
            self._accumulation,
            unit or "call",
            self._settings.accumulation.adjust_scheduler,
            self._all_ranks,
        )
        self._prepared.schedules.append(prepared)
        return prepared

    def _log_unit(self, unit: str | None) -> None:
        if self._unit_was_logged or self._all_ranks.rank != 0:
            return
        self._unit_was_logged = True
        stride = self._accumulation.stride
        if unit == "loader_batch":
            _log.log(
                WARNING if stride > 1 else INFO,
                "Prepared schedules count batches of the loader before prepare(): an update advances them by %d, a "
                "shorter last one by fewer. "
                "scheduler_unit='optimizer_step' counts updates instead.",
                stride,
            )
        else:
            counted = "updates that were applied, on any number of processes" if unit else "calls of step()"
            _log.info("Prepared schedules count %s.", counted)

    # --- data ---------------------------------------------------------------------------------------------------------

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Return a loader of this process's part of the data. Collective."""
        place = self._settings.device_placement if device_placement is None else device_placement
        data_ranks = self._all_ranks.over("data")
        loader = prepare_loader(
            data_loader,
            ranks=data_ranks.size,
            rank=data_ranks.rank,
            device=self._setup.device if place else None,
            options=self._settings.loader,
            data_ranks=data_ranks,
            start_timeout=start_timeout(os.environ),
            slice_fn=slice_fn_for_dispatch,
        )
        loader.follower = self._accumulation
        if self._engine.saves_state and not any(loader is known for known in self._prepared.loaders):
            self._prepared.loaders.append(loader)
        return loader


def has_device_map(model: nn.Module) -> bool:
    """Return True if the model, or a part of it, is spread over several devices by a `device_map`."""
    return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())


def bring_state_along(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state to the devices of its parameters; counters stay on the host, unless its kernels read
    them on the device.
    """
    for group in optimizer.param_groups:
        reads_counters = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.device == parameter.device:
                    continue
                if value.ndim or reads_counters:  # scalars are counters of updates
                    state[key] = value.to(parameter.device)


_OF_ACCUMULATION = ("sync_with_dataloader", "sync_each_batch", "adjust_scheduler")
_OF_LOADER = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "data_seed")


def check_prepared_alike(
    objects: Sequence[Any], settings: LoopSettings, dist: DistPlan, all_ranks: Gang
) -> None:
    """Raise `RankMismatchError` on all ranks if settings or prepared objects differ. Collective: exchanges one hash."""
    if all_ranks.size > 1:
        check_alike({**_settings(settings, dist), **dict(_described(objects, settings))}, all_ranks)


def _settings(settings: LoopSettings, plan: DistPlan) -> dict[str, Any]:
    accumulation, loader = settings.accumulation, settings.loader
    dist = dataclasses.asdict(plan)
    del dist["timeout_seconds"]  # may differ
    return {
        "gradient_accumulation_steps": accumulation.num_steps,
        **{name: getattr(accumulation, name) for name in _OF_ACCUMULATION},
        **{name: getattr(loader, name) for name in _OF_LOADER},
        "mixed_precision": settings.precision.word,
        "scheduler_unit": settings.schedule_unit,
        "compile": None if settings.compile is None else dataclasses.asdict(settings.compile),
        "parallelism": dist,
    }


def _described(objects: Sequence[Any], settings: LoopSettings) -> Iterator[tuple[str, Any]]:
    for number, item in enumerate(objects):
        name = f"prepare() argument {number}"
        if isinstance(item, nn.Module):
            yield f"{name}, model", model_facts(item)
        elif isinstance(item, torch.optim.Optimizer | PreparedOptimizer):
            plain = item.optimizer if isinstance(item, PreparedOptimizer) else item
            yield f"{name}, optimizer", optimizer_facts(plain)
        elif isinstance(item, DataLoader):
            # If only the main process reads, the other ranks need not have the data.
            yield f"{name}, loader", {} if settings.loader.dispatch_batches else _loader(item)
        else:
            yield name, "a schedule" if hasattr(item, "step") else "another object"


def _loader(loader: DataLoader[Any]) -> dict[str, Any]:
    facts = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__"):
        facts["samples"] = len(loader.dataset)
    return facts
