"""Make the plans that other modules read from settings, after checking all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from windlass.config.deepspeed import precision_of, stage_of, unfit, without_effect
from windlass.config.parallel import rows_compute
from windlass.config.parallel import rows_deepspeed as deepspeed
from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.keys import Key, Setting, Settings, contradiction
from windlass.config.parallel.table import values_for
from windlass.config.parallel.xla_checks import xla_problems
from windlass.config.plan import (
    SCHEDULES,
    CompilePlan,
    DistPlan,
    Float8Plan,
    PipelinePlan,
    PrecisionPlan,
    Schedule,
    ShardPlan,
    ZeroPlan,
    unfit_stages,
    usual_stages,
)
from windlass.core.errors import Problem, refuse
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.mesh import Mesh
from windlass.core.world import World

logger = get_job_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parallel:
    """The plans that settings make."""

    dist: DistPlan
    precision: PrecisionPlan
    accumulation: int | None  # micro-batches of an update; None if not set
    use_cpu: bool  # do not use accelerators
    compile: CompilePlan | None  # None does not compile
    debug: bool  # check shapes before collective operations
    settings: Settings  # where each value came from


def plan_parallel(settings: Settings, world: World) -> Parallel:
    """Make the plans for `world`. Log once which settings have no effect. Raises ConfigError with every problem met
    while reading, merging and planning.
    """
    refuse(parallel_problems(settings, world))
    for note in [*settings.notes, *_remarks(settings, world)] if world.is_main else ():
        warn_once(logger, note)
    return Parallel(
        dist=_dist(settings, world),
        precision=_precision(settings),
        accumulation=settings.value(rows.ACCUMULATION),
        use_cpu=settings.value(rows.CPU),
        compile=_compiled(settings),
        debug=settings.value(rows.DEBUG),
        settings=settings,
    )


def dtype_plans(settings: Settings, world: World | None = None) -> tuple[PrecisionPlan, DistPlan]:
    """The plans that decide dtypes, and the layout in `world`, of settings that are not checked."""
    return _precision(settings), _dist(settings, world or World())


def parallel_problems(settings: Settings, world: World) -> list[Problem]:
    """All problems of the settings in `world`."""
    return [*settings.problems, *_objections(settings, world)]


def uses_deepspeed(settings: Settings) -> bool:
    """Return True if the strategy is DeepSpeed and its stage divides anything."""
    return _asks_for_deepspeed(settings) and stage_of(_zero_config(settings)) > 0


def with_precision_of_engine(settings: Settings) -> Settings:
    """`settings`, in the precision that a configuration of DeepSpeed enables, if nothing else sets one."""
    found = precision_of(_zero_config(settings)) if uses_deepspeed(settings) else None
    if found is not None and not settings.explicit(rows.PRECISION):
        origin = settings[deepspeed.CONFIG.name].origin
        settings.add(
            Setting(rows.PRECISION.name, found, f"{origin}.{found}.enabled", "script", implicit=False)
        )
    return settings


def _asks_for_deepspeed(settings: Settings) -> bool:
    return bool(settings.value(rows.STRATEGY) == "deepspeed" or settings.value(deepspeed.USED))


def is_sharded(settings: Settings) -> bool:
    """Return True if the strategy is FSDP, by its name or by a mesh with shards."""
    return bool(settings.value(rows.STRATEGY) == "fsdp" or settings.value(rows.MESH_SHARDS) > 1)


# --- problems -------------------------------------------------------------------------------------------------------


def _objections(settings: Settings, world: World) -> Iterator[Problem]:
    yield from _deepspeed_objections(settings)
    yield from _float8_objections(settings)
    sharded = is_sharded(settings)
    yield from _axes_objections(settings)
    yield from _tensor_objections(settings)
    yield from _pipeline_objections(settings)
    yield from _mesh_fits(settings, world, settings.value(rows.MESH_SHARDS) if sharded else 1)
    yield from xla_problems(settings, world, sharded)
    if not sharded:
        off = "sharding is off; set fsdp=True, --use_fsdp or distributed_type: FSDP"
        yield from settings.without_effect(off, *rows.FSDP)
        return
    for one, other in _contradictions(settings):
        yield contradiction(one, other)
    # Without an accelerator all gradients are in host memory, where the loss scaler reaches them.
    if (
        settings.value(rows.PRECISION) == "fp16"
        and not settings.value(rows.CPU)
        and settings.value(rows.FSDP_OFFLOAD)
    ):
        fix = "keeps gradients in host memory, which the fp16 loss scaler of an accelerator cannot read; use bf16"
        yield settings[rows.FSDP_OFFLOAD.name].problem(fix)
    if settings.value(rows.FSDP_RECOMPUTE_OFFLOAD) and not settings.value(rows.FSDP_RECOMPUTE):
        fix = "has an effect only with activation_checkpointing of fsdp; set it, or leave this out"
        yield settings[rows.FSDP_RECOMPUTE_OFFLOAD.name].problem(fix)
    if settings.value(rows.DDP_HOOK) != "no":
        fix = "compresses DDP's gradients; under FSDP set fsdp.reduce_dtype instead"
        yield settings[rows.DDP_HOOK.name].problem(fix)


def _float8_objections(settings: Settings) -> Iterator[Problem]:
    precision = settings.get(rows.PRECISION.name)
    if precision is None or precision.value != "fp8":
        off = "float8 is off; set fp8=True or --mixed_precision fp8"
        yield from settings.without_effect(off, *rows_compute.FP8_OPTIONS)
    elif _asks_for_deepspeed(settings):
        fix = "is not built under DeepSpeed, whose engine casts the weights itself; use bf16, or FSDP"
        yield Problem(precision.origin, "fp8", fix)


def _deepspeed_objections(settings: Settings) -> Iterator[Problem]:
    fields = settings.explicit(*deepspeed.FIELDS)
    if not _asks_for_deepspeed(settings):
        off = "DeepSpeed is off; set --use_deepspeed or distributed_type: DEEPSPEED"
        yield from settings.without_effect(off, deepspeed.CONFIG, *deepspeed.FIELDS)
        return
    if is_sharded(settings):
        sharded = next(iter(settings.explicit(rows.STRATEGY, rows.MESH_SHARDS)))
        fix = "contradicts DeepSpeed, which is asked for too; choose one of the two"
        yield sharded.problem(fix)
    whole = settings.get(deepspeed.CONFIG.name)
    if whole is None:
        yield from unfit(_zero_config(settings), "deepspeed")
        return
    yield from unfit(whole.value, whole.origin)
    fix = f"contradicts {whole.origin}, which configures DeepSpeed as a whole; set it there"
    for found in fields:
        yield found.problem(fix)


def _zero_config(settings: Settings) -> dict[str, Any]:
    """The configuration of DeepSpeed, whose "auto" values the run decides."""
    whole: dict[str, Any] | None = settings.value(deepspeed.CONFIG)
    if whole is not None:
        return whole
    return deepspeed.config_of({found.key: found.value for found in settings.explicit(*deepspeed.FIELDS)})


def _contradictions(settings: Settings) -> Iterator[tuple[Setting, Setting]]:
    """Pairs of settings of a sharded model that cannot both hold."""
    strategy, shards = settings.get(rows.STRATEGY.name), settings.get(rows.MESH_SHARDS.name)
    if strategy and shards and strategy.value == "ddp":
        yield shards, strategy
    match settings.explicit(rows.FSDP_SHARDING, rows.FSDP_RESHARD):
        case [named, reshard] if named.value != "no_shard":
            is_name = isinstance(reshard.value, str)
            if (reshard.value if is_name else bool(reshard.value)) != (
                named.value if is_name else _frees(named.value)
            ):
                yield reshard, named
    wrap, layers = settings.explicit(rows.FSDP_WRAP), settings.get(rows.FSDP_LAYERS.name)
    if wrap and layers and wrap[0].value == "size" and layers.value:
        yield layers, wrap[0]


def _axes(settings: Settings, keys: tuple[Key, ...] = rows.MODEL_AXES) -> list[Setting]:
    """The axes in use; by default those along which processes compute the same samples together."""
    found = (settings.get(key.name) for key in keys)
    return [setting for setting in found if setting is not None and setting.value > 1]


def _axes_objections(settings: Settings) -> Iterator[Problem]:
    """Combinations of those axes with other settings that are not built."""
    for axis in _axes(settings, (*rows.MODEL_AXES, rows.MESH_EXPERT)):
        for what in _apart_from_axes(settings):
            yield axis.problem(f"is not built together with {what}, or set it to 1")


def _apart_from_axes(settings: Settings) -> Iterator[str]:
    """The settings that are not built together with an axis."""
    if settings.value(rows.STRATEGY) == "xla":
        yield "PyTorch/XLA, where one process drives all devices: use one process"
    if _asks_for_deepspeed(settings):
        yield "DeepSpeed: leave it out"
    if settings.value(rows.PRECISION) == "fp8":
        yield "float8 in linear layers: use bf16"
    if _compiled(settings) is not None:
        yield "compiled models: leave torch_compile out"


def _tensor_objections(settings: Settings) -> Iterator[Problem]:
    if settings.value(rows.MESH_TENSOR) == 1 and settings.value(rows.TENSOR_POSITIONS):
        fix = "has no effect without divided layers: set tp_size, or leave it out"
        yield settings[rows.TENSOR_POSITIONS.name].problem(fix)


def _pipeline_objections(settings: Settings) -> Iterator[Problem]:
    """What is not built together with a pipeline, and options that have no effect without one."""
    size = settings.get(rows.MESH_PIPELINE.name)
    if size is None or size.value == 1:
        options = rows.PP_SCHEDULE, rows.PP_STAGES, rows.PP_SPLIT_POINTS
        yield from settings.without_effect("there is no pipeline; set pp_size", *options)
        return
    if is_sharded(settings) and settings.value(rows.FSDP_RAM_EFFICIENT):
        fix = "is not built for pipelines, which are cut on each process: set it to false, and load the model on all"
        yield settings[rows.FSDP_RAM_EFFICIENT.name].problem(fix)
    stages = settings.get(rows.PP_STAGES.name)
    if stages is not None and (fix := unfit_stages(_schedule(settings), stages.value)):
        yield stages.problem(fix)


def _mesh_fits(settings: Settings, world: World, shards: int) -> Iterator[Problem]:
    axes, all_ranks = _axes(settings), world.size
    together = math.prod(found.value for found in axes)
    if all_ranks % together:
        times = "".join(f" times {found.origin}={found.value}" for found in axes[1:])
        fix = f"{times} must divide the number of processes, which is {all_ranks}: start a multiple of {together}"
        yield axes[0].problem(fix.strip())
        return
    sizes = settings.explicit(rows.MESH_REPLICAS, rows.MESH_SHARDS)
    replicas, data_ranks = settings.value(rows.MESH_REPLICAS), all_ranks // together
    copies = _replicas(settings, world) if is_sharded(settings) else 1
    expert = settings.value(rows.MESH_EXPERT)
    if expert > 1 and data_ranks % copies == 0 and data_ranks // copies % expert:
        own = " with different samples" if axes else ""
        whose = "the processes of a replica" if copies > 1 else f"the number of processes{own}"
        fix = f"must divide {whose}, which {'are' if copies > 1 else 'is'} {data_ranks // copies}"
        yield Problem(settings[rows.MESH_EXPERT.name].origin, expert, fix)
    if not sizes:
        return
    there_are = f"there are {all_ranks}" + (f", {together} to each batch" if axes else "")
    if settings.explicit(rows.MESH_SHARDS) or not is_sharded(settings):
        ranks = Mesh(replicate=replicas, shard=shards).size()
        if ranks != data_ranks:
            made = f"{replicas} replicas of {shards} shards make {ranks} processes"
            yield sizes[0].problem(f"{made}, and {there_are}")
    elif data_ranks % replicas:
        whose = "the number of processes" + (" with different samples" if axes else "")
        yield Problem(sizes[0].origin, replicas, f"must divide {whose}, which is {data_ranks}")


# --- notes ----------------------------------------------------------------------------------------------------------


def _remarks(settings: Settings, world: World) -> Iterator[str]:
    if uses_deepspeed(settings):
        zero = _zero(settings)
        yield from without_effect(zero.config, zero.origin)
        if settings.value(deepspeed.INIT) and stage_of(zero.config) != 3:
            where = settings[deepspeed.INIT.name].origin
            yield f"{where} has no effect at stage {stage_of(zero.config)}, which divides no parameters"
    if _asks_for_deepspeed(settings) and not uses_deepspeed(settings):
        yield "stage 0 of ZeRO divides nothing: replicated data parallelism (DDP) trains the model, without DeepSpeed"
    if not is_sharded(settings):
        if unused := settings.explicit(*rows.FSDP):
            yield f"not used, because sharding is off: {', '.join(found.origin for found in unused)}"
        return
    version = settings.get(rows.FSDP_VERSION.name)
    if version is not None and version.value == "1" and version.source == "script":
        yield f"{version.origin}=1: its spellings are accepted, and FSDP2 is used"
    one_machine = 1 < world.size == world.local_size and not settings.explicit(rows.MESH_REPLICAS)
    if one_machine and _sharding(settings).startswith("hybrid"):
        yield "hybrid sharding keeps a replica on each machine; on one machine all processes share one replica"
    prefetch = settings.get(rows.FSDP_BACKWARD_PREFETCH.name)
    if prefetch is not None and prefetch.value in ("backward_post", "no_prefetch"):
        yield (
            f"{prefetch.origin}={prefetch.value} has no effect in FSDP2, which always gathers the next layer while the "
            "gradients of the current one are computed"
        )


# --- the plans ------------------------------------------------------------------------------------------------------


def _compute(settings: Settings) -> Literal["fp32", "bf16", "fp16"]:
    """The dtype of autocast; with float8 in linear layers, all else is in bf16."""
    word = settings.value(rows.PRECISION)
    compute: Literal["fp32", "bf16", "fp16"] = {"no": "fp32", "fp8": "bf16"}.get(word, word)
    return compute


def _precision(settings: Settings) -> PrecisionPlan:
    if settings.value(rows.PRECISION) != "fp8":
        return PrecisionPlan(_compute(settings))
    options = values_for(settings, "fp8", Float8Plan)
    return PrecisionPlan(
        _compute(settings), float8=Float8Plan(**options, pad=settings.value(rows_compute.FP8_PAD))
    )


def _compiled(settings: Settings) -> CompilePlan | None:
    plan = CompilePlan(**values_for(settings, "compile", CompilePlan))
    if plan.backend == "no" or settings.value(rows_compute.COMPILE_DISABLED):
        return None
    return replace(plan, mode=None) if plan.mode == "default" else plan


def _dist(settings: Settings, world: World) -> DistPlan:
    sharded, zero = is_sharded(settings), uses_deepspeed(settings)
    return DistPlan(
        **values_for(settings, "ddp", DistPlan),
        timeout_seconds=settings.value(rows.DDP_TIMEOUT),
        strategy="deepspeed" if zero else "fsdp" if sharded else "ddp",
        shard=_shard(settings, world) if sharded else None,
        zero=_zero(settings) if zero else None,
        context=settings.value(rows.MESH_CONTEXT),
        sequence=settings.value(rows.MESH_SEQUENCE),
        tensor=settings.value(rows.MESH_TENSOR),
        tensor_positions=settings.value(rows.TENSOR_POSITIONS),
        pipeline=_pipeline(settings),
        expert=settings.value(rows.MESH_EXPERT),
    )


def _pipeline(settings: Settings) -> PipelinePlan | None:
    size = settings.value(rows.MESH_PIPELINE)
    if size == 1:
        return None
    schedule = _schedule(settings)
    stages = settings.value(rows.PP_STAGES) or usual_stages(schedule)
    return PipelinePlan(size, schedule, stages, tuple(settings.value(rows.PP_SPLIT_POINTS)))


def _schedule(settings: Settings) -> Schedule:
    word = settings.value(rows.PP_SCHEDULE)
    return next(name for name in SCHEDULES if name.lower() == word)


def _zero(settings: Settings) -> ZeroPlan:
    config = _zero_config(settings)
    whole = settings.get(deepspeed.CONFIG.name)
    allowed = config.get("zero_allow_untested_optimizer") is True
    return ZeroPlan(
        config,
        "deepspeed" if whole is None else whole.origin,
        divides_new=stage_of(config) == 3 and settings.value(deepspeed.INIT) is not False,
        any_optimizer=allowed,
    )


def _shard(settings: Settings, world: World) -> ShardPlan:
    param_dtype, reduce_dtype = _dtypes(settings)
    ahead = settings.value(rows.FSDP_BACKWARD_PREFETCH)
    computed = {
        "replicas": _replicas(settings, world),
        "wrap": _wrap(settings),
        "param_dtype": param_dtype,
        "reduce_dtype": reduce_dtype,
        "forward_prefetch": int(settings.value(rows.FSDP_FORWARD_PREFETCH)),
        "backward_prefetch": ahead if isinstance(ahead, int) else 0,
    }
    return ShardPlan(
        **{**values_for(settings, "fsdp", ShardPlan), **computed},
        reshard=_reshard(settings),
        recompute=settings.value(rows.FSDP_RECOMPUTE) or settings.value(rows.FSDP_XLA_RECOMPUTE),
        recompute_offload=settings.value(rows.FSDP_RECOMPUTE_OFFLOAD),
        ram_efficient=settings.value(rows.FSDP_RAM_EFFICIENT),
        ignored=settings.value(rows.FSDP_IGNORED),
    )


def _sharding(settings: Settings) -> str:
    """FSDP1's name of what is sharded, which old files may have as `reshard_after_forward`."""
    reshard = settings.value(rows.FSDP_RESHARD)
    return reshard if isinstance(reshard, str) else str(settings.value(rows.FSDP_SHARDING))


def _frees(sharding: str) -> bool:
    return sharding in ("full_shard", "hybrid_shard")


def _reshard(settings: Settings) -> bool | int:
    reshard = settings.value(rows.FSDP_RESHARD)
    by_name = settings.explicit(rows.FSDP_SHARDING) and not settings.explicit(rows.FSDP_RESHARD)
    if isinstance(reshard, str) or by_name:
        return _frees(_sharding(settings))
    return reshard  # type: ignore[no-any-return]


def _replicas(settings: Settings, world: World) -> int:
    if _sharding(settings) == "no_shard":
        all_ranks, together = world.size, math.prod(found.value for found in _axes(settings))
        return int(all_ranks // together)
    if settings.explicit(rows.MESH_REPLICAS):
        return int(settings.value(rows.MESH_REPLICAS))
    return world.machines if _sharding(settings).startswith("hybrid") else 1


def _wrap(settings: Settings) -> Literal["none", "transformer", "size"]:
    """The wrapping that was set; else by the names of layers, or by a minimum size, if set."""
    if not settings.explicit(rows.FSDP_WRAP):
        if settings.value(rows.FSDP_LAYERS):
            return "transformer"
        if settings.explicit(rows.FSDP_MIN_PARAMETERS) and settings.value(rows.FSDP_MIN_PARAMETERS) > 0:
            return "size"
    wrap: Literal["none", "transformer", "size"] = settings.value(rows.FSDP_WRAP)
    return wrap


def _dtypes(settings: Settings) -> tuple[Any, Any]:
    """Dtypes of gathered parameters and of gradients: as set, else the precision's with gradients averaged in fp32."""
    param = settings.value(rows.FSDP_PARAM_DTYPE)
    reduce = settings.value(rows.FSDP_REDUCE_DTYPE)
    compute = _compute(settings)
    if param is None and compute != "fp32":
        return compute, reduce or "fp32"
    return param, reduce
