"""What the settings mean under PyTorch/XLA, where one process drives all devices and a compiler shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.config.parallel import rows_launch
from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.keys import Setting, Settings
from windlass.core import xla
from windlass.core.errors import Problem, did_you_mean
from windlass.core.world import World

# Options of PyTorch/XLA's wrapper for one process per device. These leave to the compiler what they would decide.
_LEFT_TO_COMPILER = (
    "reshard_after_forward", "flatten_parameters", "execute_sharding_on_init", "optimization_barrier_in_forward",
    "optimization_barrier_in_backward", "sync_on_finalization", "mark_step_on_finalization", "disable_reshard_on_root",
    "shard_param_on_dim_0", "pin_layout_in_collective_ops", "reduce_scatter_bucket_size_mb", "coalesce_all_gather_ops",
    "fp32_reduce_scatter",
)  # fmt: skip
_CALLABLES = ("auto_wrap_policy", "auto_wrapper_callable", "param_init_fn")
_DTYPES = ("compute_dtype", "buffer_dtype")
_PROCESSES = ("sharding_groups", "sharding_rank", "sharding_world_size")
_FP32 = ("float32", "torch.float32", "fp32", "None")


def xla_problems(settings: Settings, world: World, sharded: bool) -> Iterator[Problem]:
    """Problems of the settings that ask for PyTorch/XLA, and of sharding on it."""
    asked = list(_asked(settings))
    cpu = settings.value(rows.CPU)
    yield from absent_xla(settings)
    for found in asked if asked and xla.is_selected() else ():
        if cpu:
            fix = f"contradicts {settings[rows.CPU.name].origin}; on the CPU set PJRT_DEVICE=CPU instead"
            yield found.problem(fix)
        elif world.size > 1:
            fix = f"one process drives all devices, and there are {world.size} processes: start one"
            yield found.problem(fix)
    if sharded:
        yield from _of_sharding(settings, bool(asked), xla.is_selected() and not cpu)


def absent_xla(settings: Settings) -> Iterator[Problem]:
    """The settings that ask for PyTorch/XLA by name, if it is not installed."""
    for found in _asked(settings):
        if not xla.is_selected():  # looks for the package among all that are installed
            yield found.problem(xla.NEEDED)


def _asked(settings: Settings) -> Iterator[Setting]:
    """The settings that ask for PyTorch/XLA by name."""
    for key in (rows.STRATEGY, rows.FSDP_XLA, rows_launch.TPU):
        found = settings.get(key.name)
        if found is not None and found.value in ("xla", True):
            yield found


def _of_sharding(settings: Settings, asked: bool, on_xla: bool) -> Iterator[Problem]:
    if not asked:
        for found in settings.explicit(rows.FSDP_XLA_SETTINGS, rows.FSDP_XLA_RECOMPUTE):
            if found.value:
                yield found.problem("has an effect only with xla=True; set it, or leave this out")
    for found in settings.explicit(rows.FSDP_XLA_SETTINGS):
        yield from _of_options(found)
    if not on_xla:
        return
    for key, refuses, fix in _REFUSED:
        for found in settings.explicit(key):
            if refuses(found.value):
                yield found.problem(fix)
    recompute = [f for f in settings.explicit(rows.FSDP_XLA_RECOMPUTE, rows.FSDP_RECOMPUTE) if f.value]
    wraps = settings.explicit(rows.FSDP_LAYERS, rows.FSDP_MIN_PARAMETERS) or rows.FSDP_WRAP.name in settings
    if recompute and not wraps:
        fix = "recomputes each wrapped layer, and none is wrapped: set transformer_layer_cls_to_wrap or min_num_params"
        yield recompute[0].problem(fix)


_COMPILER = "PyTorch/XLA's compiler decides when parameters are gathered and freed; leave it out"
_REFUSED: tuple[tuple[Any, Any, str], ...] = (
    (rows.FSDP_OFFLOAD, bool, "PyTorch/XLA keeps parameters on its devices; leave it out"),
    (rows.FSDP_RECOMPUTE_OFFLOAD, bool, "PyTorch/XLA keeps activations on its devices; leave it out"),
    (
        rows.FSDP_SHARDING,
        lambda word: word != "full_shard",
        "PyTorch/XLA shards everything over all devices: use full_shard, or leave fsdp out to copy the model to each",
    ),
    (rows.FSDP_RESHARD, lambda value: value is not True, _COMPILER),
    (
        rows.MESH_REPLICAS,
        lambda count: count > 1,
        "PyTorch/XLA has one replica over all devices; leave it out",
    ),
    (rows.FSDP_PARAM_DTYPE, bool, "under PyTorch/XLA the precision decides: use bf16=True"),
    (rows.FSDP_REDUCE_DTYPE, bool, "under PyTorch/XLA gradients are summed in their own dtype; leave it out"),
    (rows.FSDP_OUTPUT_DTYPE, bool, "is not applied under PyTorch/XLA; cast the outputs in the model"),
)


def _of_options(found: Setting) -> Iterator[Problem]:
    for name, value in found.value.items():
        if fix := _unfit(name, value):
            yield Problem(f"{found.origin}.{name}", value, fix)


def _unfit(name: str, value: Any) -> str:
    """Why an option of the wrapper cannot have this value; empty if it can."""
    if name in _DTYPES:
        fix = "under PyTorch/XLA the precision decides: use bf16=True, and leave it out"
        return fix * (str(value) not in _FP32)
    if name in _PROCESSES:
        fix = "belongs to one process per device; one process drives all of them, leave it out"
        return fix * (value is not None)
    if name in _CALLABLES:
        return "a function: name the layers by transformer_layer_cls_to_wrap instead"
    known = (*_LEFT_TO_COMPILER, *_DTYPES, *_PROCESSES)
    return "" if name in known else f"there is no such option{did_you_mean(name, known)}"
