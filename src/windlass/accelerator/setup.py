"""The settings of an accelerator, resolved from its arguments, its device and layout, and the one of its DeepSpeed
configurations that it uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from windlass.config.loop_options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    Plugin,
    ProfileKwargs,
    ProjectConfiguration,
)
from windlass.config.parallel.keys import merge
from windlass.config.parallel.parallel_plan import Parallel, plan_parallel, with_precision_of_engine
from windlass.config.parallel.sources import from_environment, from_plugins
from windlass.config.plan import CompilePlan, DistPlan, PrecisionPlan, ZeroPlan
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.outside import find_outside, load_outside
from windlass.core.world import World
from windlass.dist.gang import Gang
from windlass.precision.check import COMPUTE_DTYPES, autocast

SchedulerUnit = Literal["loader_batch", "optimizer_step"]
# The class of an argument; of a plugin, which says itself what takes it, the name.
_TYPES: dict[str, type | str] = {
    "dataloader_config": DataLoaderConfiguration,
    "fsdp_plugin": "FullyShardedDataParallelPlugin",
    "torch_tp_plugin": "TorchTensorParallelPlugin",
    "project_config": ProjectConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "dynamo_plugin": "TorchDynamoPlugin",
    "parallelism_config": "ParallelismConfig",
    "kwargs_handlers": list,
    "rng_types": list,
    "device_placement": bool,
    "cpu": bool,
    "step_scheduler_with_optimizer": bool,
}
_UNITS = ("loader_batch", "optimizer_step")
_RNG_TYPES = ("torch", "cuda", "xpu", "generator")


@dataclass(frozen=True, slots=True)
class Handlers:
    """One object of each type that `kwargs_handlers` may contain, or its default."""

    ddp: KwargsHandler | None = None
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    init: InitProcessGroupKwargs | None = None
    float8: Any = None
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)


_HANDLERS = (
    "AORecipeKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs", "InitProcessGroupKwargs", "AutocastKwargs",
    "ProfileKwargs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The resolved settings of a loop."""

    dist: DistPlan
    precision: PrecisionPlan
    accumulation: GradientAccumulationPlugin
    loader: DataLoaderConfiguration
    project: ProjectConfiguration
    handlers: Handlers
    cpu: bool = False
    device_placement: bool = True
    compile: CompilePlan | None = None  # how models are compiled; None does not compile them
    debug: bool = False  # compare shapes over processes before each collective
    # The unit that prepared schedules count; None if each call of `step` advances them
    schedule_unit: SchedulerUnit | None = "loader_batch"
    dynamo: Plugin | None = None
    parallelism: Any = None
    fsdp: Any = None
    # The configurations of DeepSpeed that the script named; empty if it named none
    engines: dict[str, ZeroPlan] = field(default_factory=dict)
    rng_types: list[str] = field(default_factory=lambda: ["generator"])


def resolve_settings(given: Any, world: World) -> LoopSettings:
    """Resolve the arguments of `Accelerator`, which are attributes of `given`, and the settings of the launcher."""
    # First: all that follows reads attributes of these objects.
    refuse(_wrong_types(given))
    handlers, problems = _handlers(given.kwargs_handlers or [])
    loader, project = _loader(given), _project(given)
    named, wrong = _named_plugins(given)
    problems += [*wrong, *_problems(given, project), *_objections(given, loader, project, named)]
    if handlers.float8 is not None and any(p.field == "AORecipeKwargs.config" for p in problems):
        raise ConfigError(problems)  # its settings cannot be read
    try:
        plans = {name: _plan(given, handlers, world, one) for name, one in named.items()}
        parallel = next(iter(plans.values()), None) or _plan(given, handlers, world, None)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    refuse(problems)
    engines = {name: plan.dist.zero for name, plan in plans.items() if name and plan.dist.zero is not None}
    return LoopSettings(
        dist=parallel.dist,
        precision=_with_objects(parallel.precision, handlers.float8),
        accumulation=dataclasses.replace(
            given.gradient_accumulation_plugin or GradientAccumulationPlugin(),
            num_steps=parallel.accumulation or 1,
        ),
        loader=loader,
        project=project,
        handlers=handlers,
        cpu=parallel.use_cpu,
        device_placement=given.device_placement,
        compile=parallel.compile,
        debug=parallel.debug,
        schedule_unit=given.scheduler_unit if given.step_scheduler_with_optimizer else None,
        dynamo=given.dynamo_plugin,
        parallelism=given.parallelism_config,
        fsdp=given.fsdp_plugin,
        engines=engines,
        rng_types=[str(kind) for kind in given.rng_types or ("generator",)],
    )


def _loader(given: Any) -> DataLoaderConfiguration:
    """The options of loaders, of which `split_batches` may be given beside them."""
    loader: DataLoaderConfiguration = given.dataloader_config or DataLoaderConfiguration()
    if given.split_batches is None:
        return loader
    return dataclasses.replace(loader, split_batches=given.split_batches)


def _project(given: Any) -> ProjectConfiguration:
    """The folders of the project; a given configuration without them gets those of `project_dir`."""
    project: ProjectConfiguration = given.project_config or ProjectConfiguration()
    if given.project_dir is not None and project.project_dir is None:
        project.set_directories(str(given.project_dir))
    return project


def _objections(
    given: Any, loader: DataLoaderConfiguration, project: ProjectConfiguration, named: dict[str, Plugin]
) -> Iterator[Problem]:
    """What is wrong within the objects that hold options."""
    plugins = (
        given.gradient_accumulation_plugin,
        given.dynamo_plugin,
        given.fsdp_plugin,
        given.torch_tp_plugin,
    )
    for part in (loader, project, *plugins, *named.values()):
        yield from () if part is None else part.objections()


def _with_objects(precision: PrecisionPlan, handler: Any) -> PrecisionPlan:
    """The precision with the parts of float8's options that are objects of the script."""
    if precision.float8 is None or handler is None:
        return precision
    float8 = dataclasses.replace(precision.float8, config=handler.config, selects=handler.module_filter_func)
    return dataclasses.replace(precision, float8=float8)


def _takes(argument: str, value: Any) -> bool:
    """Return True if `value` is a plugin for this argument."""
    return isinstance(value, Plugin) and value.argument == argument


def _wrong_types(given: Any) -> Iterator[Problem]:
    """Arguments of a wrong type."""
    for name, kind in _TYPES.items():
        value = getattr(given, name)
        if value is None:
            continue
        if isinstance(kind, str):
            fits, known = _takes(name, value), f"a {kind} of windlass"
        else:
            fits = isinstance(value, kind) or (kind is list and isinstance(value, tuple))
            home = " of windlass" if kind.__module__.startswith("windlass.") else ""
            known = "True or False" if kind is bool else f"a {kind.__name__}{home}"
        if not fits:
            yield Problem(f"Accelerator({name}=)", value, f"must be {known}, and is a {type(value).__name__}")


def _named_plugins(given: Any) -> tuple[dict[str, Plugin], list[Problem]]:
    """The plugins of DeepSpeed by name, that of a single one being ""; and what is wrong with them."""
    several, one = given.deepspeed_plugins, given.deepspeed_plugin
    if several is not None and one is not None:
        fix = "deepspeed_plugin is given too; give one of the two"
        return {}, [Problem("Accelerator(deepspeed_plugins=)", type(several).__name__, fix)]
    found = one if several is None else several
    if _takes("deepspeed_plugin", found):
        return {"": found}, []
    if found is None:
        return {}, []
    origin = "Accelerator(deepspeed_plugin" + ("=)" if several is None else "s=)")
    fit = (
        isinstance(found, dict) and found and all(_takes("deepspeed_plugin", item) for item in found.values())
    )
    if not fit:
        fix = "must be a dict of names and DeepSpeedPlugin objects" + (
            ", or one such object" if several is None else ""
        )
        return {}, [Problem(origin, type(found).__name__, fix)]
    return {str(name): item for name, item in found.items()}, []


def _plan(given: Any, handlers: Handlers, world: World, engine: Plugin | None) -> Parallel:
    """The plan that the arguments and the launcher's settings result in, with one plugin of DeepSpeed."""
    plugin = given.gradient_accumulation_plugin
    sources = {
        "mixed_precision": None if given.mixed_precision is None else str(given.mixed_precision),
        "gradient_accumulation_steps": (
            given.gradient_accumulation_steps if plugin is None else plugin.num_steps
        ),
        "cpu": given.cpu,
        "fsdp_plugin": None if given.fsdp_plugin is None else given.fsdp_plugin.settings(),
        "dynamo_backend": None if given.dynamo_backend is None else str(given.dynamo_backend),
        "dynamo_plugin": given.dynamo_plugin,
        "parallelism_config": given.parallelism_config,
        "ddp_kwargs": handlers.ddp,
        "float8_kwargs": None if handlers.float8 is None else handlers.float8.settings(),
        "deepspeed_plugin": engine,
        "megatron_lm_plugin": given.megatron_lm_plugin,
    }
    settings = merge(from_plugins(sources), from_environment(os.environ))
    return plan_parallel(with_precision_of_engine(settings), world)


def _handlers(given: list[KwargsHandler]) -> tuple[Handlers, list[Problem]]:
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for handler in given:
        kind = handler.handles if isinstance(handler, KwargsHandler) else ""
        name = type(handler).__name__
        if not kind:
            problems.append(
                Problem("kwargs_handlers", name, f"is none of {', '.join(_HANDLERS)} of windlass.utils")
            )
        elif kind in found:
            problems.append(Problem("kwargs_handlers", name, "is given twice; leave one out"))
        else:
            found[kind] = handler
            problems += handler.objections()
    return Handlers(**found), problems


def _problems(given: Any, project: ProjectConfiguration) -> Iterator[Problem]:
    if project.save_on_each_node:
        fix = "is not needed: save_state detects which machines share a folder, and writes to each disk"
        yield Problem("ProjectConfiguration.save_on_each_node", True, fix)
    if given.gradient_accumulation_plugin is not None and given.gradient_accumulation_steps != 1:
        fix = "gradient_accumulation_plugin is given too; set the number in one of them"
        yield Problem("gradient_accumulation_steps", given.gradient_accumulation_steps, fix)
    if given.dynamo_plugin is not None and given.dynamo_backend is not None:
        fix = "dynamo_plugin is given too; set the backend in one of them"
        yield Problem("dynamo_backend", str(given.dynamo_backend), fix)
    if given.scheduler_unit not in _UNITS:
        yield Problem("scheduler_unit", given.scheduler_unit, f"must be one of {', '.join(_UNITS)}")
    for kind in given.rng_types or ():
        if str(kind) not in _RNG_TYPES:
            yield Problem("rng_types", str(kind), f"must be one of {', '.join(_RNG_TYPES)}")


def autocast_of(
    settings: LoopSettings, device: torch.device, handler: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """The mixed-precision context that these settings ask for. `handler`: the options in place of theirs."""
    options = handler or settings.handlers.autocast
    dtype = COMPUTE_DTYPES.get(settings.precision.compute)
    if dtype is None:
        return contextlib.nullcontext()
    return autocast(device.type, dtype, enabled=options.enabled, cache_enabled=options.cache_enabled)


class EngineChoice:
    """Owns which of several configurations is selected. The first one is selected until a script selects another.

    Args:
        plans: returns them by name, that of a single one being ""; None once their accelerator is gone, after which the
            last ones stay.
        compute: "fp32", "bf16" or "fp16".
        selected: the name of one; "" is the first.
    """

    def __init__(
        self, plans: Callable[[], Mapping[str, ZeroPlan] | None], compute: str, selected: str = ""
    ) -> None:
        self._present, self._compute, self._selected = plans, compute, selected
        self._last: Mapping[str, ZeroPlan] = {}
        self._divide: Callable[[ZeroPlan | None], Any] = lambda plan: None
        self._dividing: Any = None

    def __reduce__(self) -> Any:
        # A data worker gets the selection without the models that are built here.
        return _chosen, (dict(self._plans()), self._compute, self._selected)

    def divide_new_models(self, divide: Callable[[ZeroPlan | None], Any]) -> None:
        """Call `divide` with the selected configuration now and after each selection, and keep its result alive."""
        self._divide, self._dividing = divide, divide(self.plan)

    def _plans(self) -> Mapping[str, ZeroPlan]:
        present = self._present()
        self._last = self._last if present is None else present
        return self._last

    @property
    def plan(self) -> ZeroPlan | None:
        """The selected configuration; None without DeepSpeed."""
        plans = self._plans()
        return plans.get(self._selected) or next(iter(plans.values()), None)

    @property
    def plugin(self) -> Any:
        """The selected configuration as a plugin, every field filled in; None without DeepSpeed."""
        plan = self.plan
        return None if plan is None else self._plugin_of(plan)

    @property
    def plugins(self) -> dict[str, Any] | None:
        """All as plugins by name; None if the script named none."""
        named = {name: self._plugin_of(plan) for name, plan in self._plans().items() if name}
        return named or None

    def get(self, name: str) -> Any:
        """The plugin of this name. Raises ConfigError if there is none."""
        return (self.plugins or {})[self._known(name)]

    def select(self, name: str) -> None:
        """Use this one in the next `prepare`. Raises as `get` does."""
        self._selected = self._known(name)
        self._dividing = self._divide(self.plan)

    def _plugin_of(self, plan: ZeroPlan) -> Any:
        return load_outside("plugins of DeepSpeed").plugin_of(plan, self._compute)

    def _known(self, name: str) -> str:
        names = [known for known in self._plans() if known]
        if name not in names:
            fix = f"is not among deepspeed_plugins, which has {', '.join(map(repr, names)) or 'none'}"
            raise ConfigError(Problem("deepspeed_plugin", name, fix))
        return name


def _chosen(plans: Mapping[str, ZeroPlan], compute: str, selected: str) -> EngineChoice:
    return EngineChoice(lambda: plans, compute, selected)


class Setup:
    """The settings, device and layout of one accelerator.

    Args:
        dist: returns how models are spread over processes.

    Attributes:
        engines: the configurations of DeepSpeed.
    """

    def __init__(
        self, settings: LoopSettings, all_ranks: Gang, device: torch.device, dist: Callable[[], DistPlan]
    ) -> None:
        self.settings, self.device, self.all_ranks, self._dist = settings, device, all_ranks, dist
        # The state of the process has this, and outlives an accelerator, whose models are not to live as long.
        plans = weakref.WeakMethod(self._zero_plans)
        self.engines = EngineChoice(
            lambda: None if (of := plans()) is None else of(), settings.precision.compute
        )

    def _zero_plans(self) -> dict[str, ZeroPlan]:
        only = self.dist.zero
        return self.settings.engines or ({} if only is None else {"": only})

    @property
    def dist(self) -> DistPlan:
        """How models are spread over processes."""
        return self._dist()

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The mixed-precision context of this loop; see `Accelerator.autocast`."""
        return autocast_of(self.settings, self.device, autocast_handler)

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded."""
        return self.dist.strategy == "fsdp"

    @property
    def fsdp_plugin(self) -> Any:
        """How models are sharded: the plugin of the script, or one with the same settings; None if not sharded."""
        shard = self.dist.shard if self.is_fsdp2 else None
        if self.settings.fsdp is not None or shard is None:
            return self.settings.fsdp
        known = find_outside("plugins of FSDP")
        return None if known is None else known.fsdp_plugin_of(shard)
