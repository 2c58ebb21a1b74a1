"""A DeepSpeed configuration: what is known and built of it, and its values in a run, without "auto"."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.core.errors import Problem, unknown
from windlass.core.lazy import reverse

AUTO = "auto"

_OTHER_STEP = "updates weights later than their gradients, so the result is another; leave it out"
_REASONS: dict[str, tuple[str, ...]] = {
    "is a tracker of the engine, which does not know the run's losses; set report_to, which sends them all": (
        "tensorboard", "wandb", "comet", "csv_monitor", "monitor_config",
    ),
    "changes the model or its data by DeepSpeed's own classes, which a run does not use; leave it out": (
        "sparse_attention", "compression_training", "data_efficiency", "curriculum_learning", "hybrid_engine",
        "quantize_training", "progressive_layer_drop", "eigenvalue", "weight_quantization",
    ),
    "splits a model in another way than ZeRO, with layers of DeepSpeed's own; leave it out": (
        "tensor_parallel", "sequence_parallel_size", "data_parallel_size", "pipeline", "expert_parallel",
        "use_data_before_expert_parallelism",
    ),
    _OTHER_STEP: ("zenflow", "superoffload"),
    "is set by the run: bf16=True, fp16=True or mixed_precision; leave it out": ("torch_autocast", "data_types"),
    "is NVIDIA's apex, which DeepSpeed does not combine with ZeRO; set bf16=True or fp16=True": ("amp",),
    "is not needed: a run continues on any number of processes, and global_batch_size keeps its updates": (
        "elasticity",
    ),
    "is a search that DeepSpeed's own launcher makes; leave it out": ("autotuning",),
    "is not combined with ZeRO; set torch_compile=True": ("compile", "graph_harvesting"),
    "is of gradients that ZeRO does not divide; leave it out": ("sparse_gradients",),
    "is decided by the run, which accumulates itself; leave it out": ("managed_gradient_accumulation",),
    "is a service of Azure, and a run writes its checkpoints itself; leave it out": ("nebula",),
}  # fmt: skip
_ZERO_REASONS: dict[str, tuple[str, ...]] = {
    "sends rounded values by kernels for CUDA, so results differ from those of one process; leave it out": (
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
        "zeropp_loco_param",
    ),
    "divides among groups of ranks, and checkpoints are of parts of one group; leave it out": (
        "zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather",
    ),
    _OTHER_STEP: ("zenflow",),
    "is gone from DeepSpeed; leave it out": ("legacy_stage1",),
    "is needed: a run clips by the norm, and checks that it is finite; leave it out": ("compute_grad_norm",),
    'is an old key; use "offload_param": {"device": "cpu"}': ("cpu_offload_params", "cpu_offload_use_pin_memory"),
    "would move where the engine keeps parameters, which checkpoints read; leave it out": ("parameter_alignment",),
    "is for Muon, which needs whole matrices: train it with fsdp=True": ("save_muon_momentum_buffer_in_memory",),
}  # fmt: skip
# Key -> why it is refused; empty for those that are honoured.
KEYS = {
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
         "zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "communication_data_type", "steps_per_print",
         "prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown", "memory_breakdown", "dump_state",
         "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "comms_logger", "flops_profiler",
         "disable_allgather", "seed", "dataloader_drop_last", "use_node_local_storage", "checkpoint",
         "activation_checkpointing", "aio", "timers"), ""),
    **reverse(_REASONS),
}  # fmt: skip
SECTION_KEYS = {
    **dict.fromkeys(
        ("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
         "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint", "offload_param",
         "offload_optimizer", "sub_group_size", "cpu_offload", "prefetch_bucket_size", "param_persistence_threshold",
         "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
         "gather_16bit_weights_on_model_save", "use_all_reduce_for_fetch_params",
         "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters",
         "round_robin_gradients", "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings",
         "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
         "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "module_granularity_threshold",
         "stage3_module_granularity_threshold", "stage3_model_persistence_threshold",
         "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "allgather_sequential",
         "use_multi_rank_bucket_allreduce", "pipeline_loading_checkpoint", "enable_sanity_checks",
         "leaf_module"), ""),
    **reverse(_ZERO_REASONS),
}  # fmt: skip
_SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
# Path of a section -> its keys. DeepSpeed reads other keys of most of them for nothing.
INNER_KEYS: dict[str, tuple[str, ...]] = {
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "bf16": (
        "enabled",
        "immediate_grad_update",
        "check_grad_overflow",
        "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    ),
    "fp16": ("enabled", "auto_cast", *_SCALING, "min_loss_scale", "fp16_master_weights_and_grads"),
    "zero_optimization.offload_param": (
        "device",
        "nvme_path",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "pin_memory",
    ),
    "zero_optimization.offload_optimizer": (
        "device",
        "nvme_path",
        "buffer_count",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
        "ratio",
        "super_offload",
        "cpuadam_cores_perc",
    ),
    "activation_checkpointing": (
        "partition_activations",
        "number_checkpoints",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
        "profile",
        "cpu_checkpointing",
    ),
    # "thread_count" is an old name, without effect, that printed configurations still have.
    "aio": (
        "block_size",
        "queue_depth",
        "intra_op_parallelism",
        "thread_count",
        "single_submit",
        "overlap_events",
        "use_gds",
    ),
}
_FILES_STAGE = "keeps tensors in files at stage 3 alone; set stage 3, or device cpu"
_SCATTERED = (
    'needs "zero_optimization": {"reduce_scatter": false} at stages 2 and 3; set it, or leave this out'
)
_CPU_ADAM = "is of DeepSpeedCPUAdam, and a run updates with an optimizer of its own; leave it out"
# Path -> the value with which DeepSpeed takes any optimizer.
_OF_CPU_ADAM = {
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
}
_FILES_PATH = "needs nvme_path: a folder on a local disk, of this run alone"
_ADAMW = (
    "must be AdamW or Adam, which PyTorch's AdamW carries out: choose others by optim=..., and leave this out"
)
_NOT_COUPLED = "adds weight decay to gradients, which AdamW does not; leave it out"
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode")
_NO_OPTION = (
    "is not read: lr, betas, eps and weight_decay are; set others by TrainingArguments(optim_args=...)"
)
_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
STAGES = (0, 1, 2, 3)
_NO_STAGE = 'must be 0, 1, 2 or 3: {"zero_optimization": {"stage": 2}} shards gradients and optimizer state'


@dataclass(frozen=True, slots=True)
class RunValues:
    """The values of a run that "auto" represents, and the arguments that set them."""

    values: Mapping[str, tuple[Any, str]]  # path in the configuration -> (value, argument)
    # Width of the model, from which sizes of buckets follow; None if it is not known
    hidden_size: int | None = None


def stage_of(config: Mapping[str, Any]) -> int:
    """The stage of ZeRO; 0 replicates everything. One that does not exist, which `unfit` reports, counts as 0."""
    stage = value_at(config, "zero_optimization.stage")
    return int(stage) if stage in STAGES else 0


def value_at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a path such as "zero_optimization.stage"."""
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return default if found is None else found


def unfit(config: Mapping[str, Any], origin: str) -> Iterator[Problem]:
    """What of a configuration is unknown, malformed or not built."""
    yield from _known(config, KEYS, origin)
    section = config.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        yield Problem(f"{origin}.zero_optimization", section, _NO_STAGE)
        return
    yield from _known(section, SECTION_KEYS, f"{origin}.zero_optimization")
    if section.get("stage", 0) not in STAGES:
        yield Problem(f"{origin}.zero_optimization.stage", section["stage"], _NO_STAGE)
    for path, keys in INNER_KEYS.items():
        yield from _unfit_section(value_at(config, path), keys, f"{origin}.{path}")
    for name in ("offload_optimizer", "offload_param"):
        device = value_at(section, f"{name}.device", "none")
        if device not in ("none", "cpu", "nvme"):
            yield Problem(f"{origin}.zero_optimization.{name}.device", device, "must be none, cpu or nvme")
    yield from _unfit_files(config, origin)
    # DeepSpeed would say so once the model is loaded.
    if stage_of(config) > 1 and section.get("reduce_scatter", True):
        for name, usual in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if config.get(name, usual) != usual:
                yield Problem(f"{origin}.{name}", config[name], _SCATTERED)
    for path, usual in _OF_CPU_ADAM.items():
        if value_at(config, path, usual) != usual:
            yield Problem(f"{origin}.{path}", value_at(config, path), _CPU_ADAM)
    yield from _unfit_optimizer(_section(config, "optimizer"), origin)
    kind = value_at(config, "scheduler.type")
    if isinstance(config.get("scheduler"), Mapping) and kind not in _SCHEDULERS:
        yield Problem(f"{origin}.scheduler.type", kind, f"must be one of {', '.join(_SCHEDULERS)}")


def without_effect(config: Mapping[str, Any], origin: str) -> Iterator[str]:
    """Notes on what changes nothing in this configuration."""
    zero = _section(config, "zero_optimization")
    if value_at(zero, "offload_param.device") == "cpu" and stage_of(config) != 3:
        yield f"{origin}: offload_param has no effect at stage {stage_of(config)}, which divides no parameters"
    if zero.get("overlap_comm") and stage_of(config) == 1:
        yield f"{origin}: overlap_comm has no effect at stage 1, which reduces gradients after the last backward"
    if value_at(config, "activation_checkpointing.partition_activations"):
        yield f"{origin}: partition_activations has no effect: it divides among ranks of tensor parallelism"
    ahead = [name for name in _AHEAD if {name, name.removeprefix("stage3_")} & zero.keys()]
    if ahead and has_param_files(config):
        yield f"{origin}: {' and '.join(ahead)} are 0 with parameters in files, which are read as they are used"


def _known(section: Mapping[str, Any], table: Mapping[str, str], origin: str) -> Iterator[Problem]:
    yield from unknown(section, table, f"{origin}.{{}}".format, "DeepSpeed has no such key")
    for name, value in section.items():
        if table.get(name) and value not in (None, False) and not _is_off(value):
            yield Problem(f"{origin}.{name}", value, table[name])


def _unfit_section(given: Any, keys: tuple[str, ...], origin: str) -> Iterator[Problem]:
    if isinstance(given, Mapping):
        yield from unknown(given, keys, f"{origin}.{{}}".format, "DeepSpeed has no such key")
    elif given is not None:
        yield Problem(origin, given, f"must be a section with keys such as {keys[0]!r}")


def _is_off(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("enabled", True) is False


def _unfit_files(config: Mapping[str, Any], origin: str) -> Iterator[Problem]:
    for path, folder in file_folders(config):
        if stage_of(config) != 3:
            device = path.replace("nvme_path", "device")
            yield Problem(f"{origin}.{device}", "nvme", _FILES_STAGE)
        elif not folder:
            yield Problem(f"{origin}.{path}", folder, _FILES_PATH)


def file_folders(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The path in the configuration and the value of each folder in which tensors are kept between steps."""
    found = []
    for name in ("offload_optimizer", "offload_param"):
        place, folder = f"zero_optimization.{name}.device", f"zero_optimization.{name}.nvme_path"
        if value_at(config, place) == "nvme":
            found.append((folder, str(value_at(config, folder) or "")))
    return found


def has_param_files(config: Mapping[str, Any]) -> bool:
    """Return True if parameters are in files between their uses."""
    return any("offload_param" in path for path, _ in file_folders(config))


def _unfit_optimizer(section: Mapping[str, Any], origin: str) -> Iterator[Problem]:
    kind = section.get("type")
    if section and str(kind).lower() not in ("adamw", "adam"):
        yield Problem(f"{origin}.optimizer.type", kind, _ADAMW)
        return
    params, where = _section(section, "params"), f"{origin}.optimizer.params"
    yield from unknown(params, _OPTIONS, f"{where}.{{}}".format, _NO_OPTION)
    if not params.get("adam_w_mode", True):
        yield Problem(f"{where}.adam_w_mode", params["adam_w_mode"], _NOT_COUPLED)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


# --- the values of a run ----------------------------------------------------------------------------------------------


_WARMUP = "scheduler.params.warmup_num_steps"
# Path -> the argument of a run that its "auto" represents.
ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x processes",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "(adam_beta1, adam_beta2)",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    _WARMUP: "warmup_steps",
    "scheduler.params.total_num_steps": "the updates of the run",
}


def explained(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Path, value and source of each value; the source is empty for a value that the configuration itself has."""
    for path, value in _leaves(config):
        source = ARGUMENTS.get(path) or (
            "the hidden_size of the model" if path in _bucket_sizes(None) else "its default"
        )
        yield path, value, source if value == AUTO else ""


def completed(config: Mapping[str, Any], origin: str, run: RunValues) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration with a value in place of each "auto", and what contradicts the run's arguments."""
    filled, problems = copy.deepcopy(dict(config)), list[Problem]()
    if value_at(filled, "scheduler.params.warmup_min_lr") == AUTO:
        _put(filled, "scheduler.params.warmup_min_lr", 0)
    for path, value in _leaves(filled):
        wanted = run.values.get(path)
        if wanted is not None and value == AUTO:
            _put(filled, path, wanted[0])
        elif wanted is not None and not _same(value, wanted[0]):
            fix = f'contradicts {wanted[1]}={wanted[0]!r}; set "auto" here, or the same value in both'
            problems.append(Problem(f"{origin}.{path}", value, fix))
    warmup = value_at(filled, _WARMUP)
    if warmup not in (None, AUTO) and (not isinstance(warmup, int) or warmup < 1):
        source = run.values.get(_WARMUP, (warmup, "a whole number"))[1]
        fix = f'must be a whole number from 1 on for DeepSpeed: set {source}, or leave out the section "scheduler"'
        problems.append(Problem(f"{origin}.{_WARMUP}", warmup, fix))
    # Whole weights are saved without it: DeepSpeed's default remains.
    for path, size in {**_bucket_sizes(run.hidden_size), _SAVES_WHOLE: None}.items():
        if value_at(filled, path) == AUTO:
            _put(filled, path, size)
    for path, value in _leaves(filled):
        if value == AUTO:
            fix = 'has no value for "auto" in this run; write the value, or leave the key out'
            problems.append(Problem(f"{origin}.{path}", AUTO, fix))
    return filled, problems


_SAVES_WHOLE = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def _bucket_sizes(width: int | None) -> dict[str, int | None]:
    """The sizes that transformers computes for "auto"; without a width those of DeepSpeed remain (None)."""
    square = None if width is None else width * width
    return {
        "zero_optimization.reduce_bucket_size": square,
        "zero_optimization.stage3_prefetch_bucket_size": None if square is None else int(0.9 * square),
        "zero_optimization.stage3_param_persistence_threshold": None if width is None else 10 * width,
    }


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list | tuple) and isinstance(value, list | tuple):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    numbers = (int, float)
    if isinstance(value, numbers) and isinstance(wanted, numbers):
        return math.isclose(value, wanted, rel_tol=1e-9)
    return bool(value == wanted)


def _leaves(config: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in config.items():
        path = f"{before}{name}"
        found += _leaves(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
    return found


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set a value that exists; None removes it."""
    *sections, last = path.split(".")
    for name in sections:
        config = config[name]
    if value is None:
        del config[last]
    else:
        config[last] = value


# Sections and keys that a run carries out itself.
_OWN = (
    "optimizer",
    "scheduler",
    "train_batch_size",
    "gradient_clipping",
    "seed",
    "dataloader_drop_last",
    "checkpoint",
)


# How far ahead parameters are gathered, and kept for their next use.
_AHEAD = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")

# What becomes of a group of samples; a run decides it.
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def precision_of(config: Mapping[str, Any]) -> str | None:
    """ "bf16" or "fp16" if the configuration enables it by itself."""
    return next((name for name in ("bf16", "fp16") if value_at(config, f"{name}.enabled") is True), None)


def in_precision(config: Mapping[str, Any], compute: str) -> dict[str, Any]:
    """The configuration with the section of "bf16" or "fp16" enabled, if the run computes in one of them."""
    if compute not in ("bf16", "fp16"):
        return dict(config)
    return {**config, compute: {**config.get(compute, {}), "enabled": True}}


def for_engine(config: Mapping[str, Any], micro: int) -> dict[str, Any]:
    """The configuration of the engine: the run accumulates, clips and schedules itself."""
    kept = {name: value for name, value in config.items() if name not in _OWN and not _is_off(value)}
    zero = dict(config["zero_optimization"])
    if stage_of(config) != 3:
        zero.pop("offload_param", None)
    if stage_of(config) < 2:
        zero.pop("overlap_comm", None)  # an error of DeepSpeed, as it does not count the micro-batches
    if has_param_files(config):
        # DeepSpeed reads ahead a parameter that is used twice into two buffers, and each whole parameter keeps one.
        for name in _AHEAD:
            zero.pop(name.removeprefix("stage3_"), None)
            zero[name] = 0
    return {
        **kept,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Practically never: the run logs its steps itself.
        "steps_per_print": kept.get("steps_per_print") or 1 << 62,
    }


_FURTHER = itertools.count(1)


def for_frozen(config: Mapping[str, Any], compute: str) -> dict[str, Any]:
    """The configuration of the engine of a model that is not trained, whose parameters stage 3 divides.

    Its parameters in files have a new folder: DeepSpeed empties the folder of each model that it divides.

    Args:
        config: as it was given.
        compute: "fp32", "bf16" or "fp16".
    """
    kept = _without_auto(config)
    zero = {name: value for name, value in kept["zero_optimization"].items() if name != "offload_optimizer"}
    files = _section(zero, "offload_param")
    if files.get("device") == "nvme":
        folder = f"{files.get('nvme_path')}/further-{next(_FURTHER)}"
        zero["offload_param"] = {**files, "nvme_path": folder}
    own = for_engine({**kept, "zero_optimization": zero}, micro=1)
    for dtype in ("bf16", "fp16"):
        own[dtype] = {**own.get(dtype, {}), "enabled": False}
    return in_precision(own, compute)


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in section.items()
        if value != AUTO
    }
