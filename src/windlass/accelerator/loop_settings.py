"""The arguments of `Accelerator`, checked as a whole and resolved into plans before anything is prepared."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.config.parallel import Parallel, from_environment, from_plugins, merge, plan_parallel
from windlass.config.plan import DistPlan, PrecisionPlan
from windlass.config.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)
from windlass.core.errors import ConfigError, Problem
from windlass.core.world import World

SchedulerUnit = Literal["loader_batch", "optimizer_step"]
_PARTS: dict[str, type] = {
    "dataloader_config": DataLoaderConfiguration,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "torch_tp_plugin": TorchTensorParallelPlugin,
    "project_config": ProjectConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "dynamo_plugin": TorchDynamoPlugin,
    "parallelism_config": ParallelismConfig,
    "kwargs_handlers": list,
    "rng_types": list,
    "device_placement": bool,
    "cpu": bool,
    "step_scheduler_with_optimizer": bool,
}
_UNITS = ("loader_batch", "optimizer_step")
_RNG_TYPES = ("torch", "cuda", "xpu", "generator")


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `Accelerator`, as they were given; None means not given."""

    device_placement: bool = True
    split_batches: bool | None = None
    mixed_precision: Any = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    dataloader_config: DataLoaderConfiguration | None = None
    deepspeed_plugin: Any = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    torch_tp_plugin: TorchTensorParallelPlugin | None = None
    megatron_lm_plugin: Any = None
    rng_types: list[Any] | None = None
    project_dir: Any = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    kwargs_handlers: list[KwargsHandler] | None = None
    dynamo_backend: Any = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    deepspeed_plugins: Any = None
    parallelism_config: ParallelismConfig | None = None
    scheduler_unit: Any = "loader_batch"


@dataclass(frozen=True, slots=True)
class Handlers:
    """One object of each kind that `kwargs_handlers` may hold, or its default."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    init: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)


_KINDS: dict[type[KwargsHandler], str] = {
    DistributedDataParallelKwargs: "ddp",
    GradScalerKwargs: "scaler",
    InitProcessGroupKwargs: "init",
    AutocastKwargs: "autocast",
    ProfileKwargs: "profile",
}


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The resolved settings of a loop.

    Attributes:
        compile_backend, compile_mode: how models are compiled; without a backend they are not.
        debug: compare shapes over processes before each collective.
        schedule_unit: what prepared schedules count; None if each call of `step` advances them.
    """

    dist: DistPlan
    precision: PrecisionPlan
    accumulation: GradientAccumulationPlugin
    loader: DataLoaderConfiguration
    project: ProjectConfiguration
    handlers: Handlers
    cpu: bool = False
    device_placement: bool = True
    compile_backend: str | None = None
    compile_mode: str | None = None
    debug: bool = False
    schedule_unit: SchedulerUnit | None = "loader_batch"
    dynamo: TorchDynamoPlugin | None = None
    parallelism: ParallelismConfig | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None
    rng_types: tuple[str, ...] = ("generator",)


def resolve_settings(request: Request, world: World) -> LoopSettings:
    """Resolve the arguments and the launcher's settings.

    Raises:
        ConfigError: everything that is wrong or cannot be honoured, all at once.
    """
    if wrong := list(_wrong_kinds(request)):
        raise ConfigError(wrong)
    handlers, problems = _handlers(request.kwargs_handlers or [])
    loader, project = _loader(request), _project(request)
    problems += [*_contradictions(request), *_unknown_words(request), *_project_problems(project)]
    parts: Iterable[Any] = (
        loader,
        project,
        request.gradient_accumulation_plugin,
        request.dynamo_plugin,
        request.fsdp_plugin,
        request.torch_tp_plugin,
    )
    problems += [problem for part in parts if part is not None for problem in part.objections()]
    parallel, others = _parallel(request, handlers, world)
    problems += others
    if problems or parallel is None:
        raise ConfigError(problems)
    return LoopSettings(
        dist=parallel.dist,
        precision=parallel.precision,
        accumulation=_accumulation(request, parallel),
        loader=loader,
        project=project,
        handlers=handlers,
        cpu=parallel.use_cpu,
        device_placement=request.device_placement,
        compile_backend=parallel.compile_backend,
        compile_mode=parallel.compile_mode,
        debug=parallel.debug,
        schedule_unit=request.scheduler_unit if request.step_scheduler_with_optimizer else None,
        dynamo=request.dynamo_plugin,
        parallelism=request.parallelism_config,
        fsdp=request.fsdp_plugin,
        rng_types=tuple(str(kind) for kind in request.rng_types or ("generator",)),
    )


def _wrong_kinds(request: Request) -> Iterator[Problem]:
    """Arguments of a wrong type."""
    for name, kind in _PARTS.items():
        value = getattr(request, name)
        listed = kind is list and isinstance(value, tuple)
        if value is not None and not isinstance(value, kind) and not listed:
            known = "True or False" if kind is bool else f"a {kind.__name__}"
            home = " of windlass" if kind.__module__.startswith("windlass.") else ""
            fix = f"must be {known}{home}, and is a {type(value).__name__}"
            yield Problem(f"Accelerator({name}=)", value, fix)


def _parallel(request: Request, handlers: Handlers, world: World) -> tuple[Parallel | None, list[Problem]]:
    """The resolved plan of all sources, or the problems with it."""
    plugin = request.gradient_accumulation_plugin
    steps = request.gradient_accumulation_steps if plugin is None else plugin.num_steps
    given = {
        "mixed_precision": None if request.mixed_precision is None else str(request.mixed_precision),
        "gradient_accumulation_steps": steps,
        "cpu": request.cpu,
        "fsdp_plugin": None if request.fsdp_plugin is None else request.fsdp_plugin.settings(),
        "dynamo_backend": None if request.dynamo_backend is None else str(request.dynamo_backend),
        "dynamo_plugin": request.dynamo_plugin,
        "parallelism_config": request.parallelism_config,
        "ddp_kwargs": handlers.ddp,
        "deepspeed_plugin": request.deepspeed_plugin,
        "deepspeed_plugins": request.deepspeed_plugins,
        "megatron_lm_plugin": request.megatron_lm_plugin,
    }
    try:
        return plan_parallel(merge(from_plugins(given), from_environment(os.environ)), world), []
    except ConfigError as error:
        return None, error.problems


def _accumulation(request: Request, parallel: Parallel) -> GradientAccumulationPlugin:
    plugin = request.gradient_accumulation_plugin or GradientAccumulationPlugin()
    return dataclasses.replace(plugin, num_steps=parallel.accumulation or 1)


def _handlers(given: list[KwargsHandler]) -> tuple[Handlers, list[Problem]]:
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for handler in given:
        kind = _KINDS.get(type(handler))
        name = type(handler).__name__
        if kind is None:
            known = ", ".join(known.__name__ for known in _KINDS)
            problems.append(Problem("kwargs_handlers", name, f"is not one of {known}"))
        elif kind in found:
            problems.append(Problem("kwargs_handlers", name, "is given twice; leave one out"))
        else:
            found[kind] = handler
            problems += handler.objections()
    return Handlers(**found), problems


def _loader(request: Request) -> DataLoaderConfiguration:
    config = request.dataloader_config or DataLoaderConfiguration()
    if request.split_batches is None:
        return config
    return dataclasses.replace(config, split_batches=request.split_batches)


def _project(request: Request) -> ProjectConfiguration:
    project = request.project_config or ProjectConfiguration()
    if request.project_dir is not None and project.project_dir is None:
        project.set_directories(str(request.project_dir))
    return project


def _project_problems(project: ProjectConfiguration) -> Iterator[Problem]:
    if project.save_on_each_node:
        fix = "is not needed: save_state finds out which machines share a folder, and each disk gets its own files"
        yield Problem("ProjectConfiguration.save_on_each_node", True, fix)


def _contradictions(request: Request) -> Iterator[Problem]:
    if request.gradient_accumulation_plugin is not None and request.gradient_accumulation_steps != 1:
        fix = "gradient_accumulation_plugin is given too; say the number in one of them"
        yield Problem("gradient_accumulation_steps", request.gradient_accumulation_steps, fix)
    if request.dynamo_plugin is not None and request.dynamo_backend is not None:
        fix = "dynamo_plugin is given too; say the backend in one of them"
        yield Problem("dynamo_backend", str(request.dynamo_backend), fix)


def _unknown_words(request: Request) -> Iterator[Problem]:
    if request.scheduler_unit not in _UNITS:
        yield Problem("scheduler_unit", request.scheduler_unit, f"must be one of {', '.join(_UNITS)}")
    for kind in request.rng_types or ():
        if str(kind) not in _RNG_TYPES:
            yield Problem("rng_types", str(kind), f"must be of {', '.join(_RNG_TYPES)}")
