"""Configuration objects of a user-owned loop, under the names and with the defaults that scripts know.

They are data: making one reads no environment variable and touches no device. What an object asks for and Windlass
cannot do is found by `objections()` when the object is used, and raised together with everything else that is wrong.
`tests/config/test_plugins.py` holds their names and defaults against those that scripts were written for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from windlass.config.parallel.rows_training import COMPILE_MODES
from windlass.config.parallel.table import described, value_problems
from windlass.config.plugin_base import (
    KwargsHandler,
    Refusal,
    refused,
    type_problems,
)
from windlass.config.plugin_engines import (
    AORecipeKwargs,
    BnbQuantizationConfig,
    DeepSpeedPlugin,
    FP8RecipeKwargs,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from windlass.config.plugin_fsdp import FullyShardedDataParallelPlugin
from windlass.config.plugin_parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from windlass.config.plugin_words import DDPCommunicationHookType, DynamoBackend
from windlass.core.errors import Problem

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]


@dataclass
class AutocastKwargs(KwargsHandler):
    """How forward passes are run in mixed precision.

    Attributes:
        enabled: False runs them in the weights' own type.
        cache_enabled: whether a weight that was cast is kept until the context ends; None leaves it to PyTorch.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """The loss scale of fp16.

    Attributes:
        init_scale: the first scale.
        growth_factor, backoff_factor: what multiplies it after a run of good updates, and after an overflow.
        growth_interval: how many good updates make such a run.
        enabled: False scales nothing.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def objections(self) -> Iterator[Problem]:
        yield from type_problems(self)
        if not self.init_scale > 0:
            yield Problem("GradScalerKwargs.init_scale", self.init_scale, "must be above 0")
        if not self.growth_factor > 1:
            yield Problem("GradScalerKwargs.growth_factor", self.growth_factor, "must be above 1")
        if not 0 < self.backoff_factor < 1:
            yield Problem("GradScalerKwargs.backoff_factor", self.backoff_factor, "must lie between 0 and 1")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the processes of a job meet.

    Attributes:
        backend: the library that carries tensors. The default means the one that fits the device (gloo on a CPU).
        init_method: address of the meeting point; None reads `MASTER_ADDR` and `MASTER_PORT`, as launchers set them.
        timeout: how long a process waits for the others; None is ten minutes on nccl and thirty elsewhere.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)

    def objections(self) -> Iterator[Problem]:
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0):
            fix = "must be a datetime.timedelta above zero"
            yield Problem("InitProcessGroupKwargs.timeout", self.timeout, fix)


@dataclass
class ProfileKwargs(KwargsHandler):
    """What `accelerator.profile()` records.

    Attributes:
        activities: kinds of work to record, of "cpu", "cuda", "xpu", "mtia" and "hpu"; None records what there is.
        schedule_option: `wait`, `warmup`, `active`, `repeat` and `skip_first`, in calls of the profiler's `step`.
        on_trace_ready: called with the profiler whenever a cycle of the schedule ends.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: what is noted of each operation.
        output_trace_dir: folder for one Chrome trace per process; None writes none.
    """

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def objections(self) -> Iterator[Problem]:
        known = ("cpu", "xpu", "mtia", "cuda", "hpu")
        for activity in self.activities or ():
            if activity not in known:
                yield Problem("ProfileKwargs.activities", activity, f"must be of {', '.join(known)}")
        for key in self.schedule_option or {}:
            if key not in ("wait", "warmup", "active", "repeat", "skip_first"):
                fix = "is no option of a schedule: wait, warmup, active, repeat, skip_first"
                yield Problem("ProfileKwargs.schedule_option", key, fix)


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How a model is replicated.

    Attributes:
        dim: the axis of the batch (0: the only one that processes share).
        check_reduction: has had no effect in PyTorch for long, and is refused.
        gradient_as_bucket_view: gradients live where they are reduced, which saves a copy; always so, and both values
            mean that.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)

    def objections(self) -> Iterator[Problem]:
        yield from refused(
            self,
            (
                Refusal("dim", 0, "a batch is shared out along its first axis; leave it at 0"),
                Refusal("check_reduction", False, "has had no effect in PyTorch for long; leave it out"),
            ),
        )
        if not isinstance(self.gradient_as_bucket_view, bool):
            fix = "must be True or False"
            yield Problem(
                "DistributedDataParallelKwargs.gradient_as_bucket_view", self.gradient_as_bucket_view, fix
            )
        yield from value_problems(self, "ddp_config")


described(DistributedDataParallelKwargs, "ddp_config")


@dataclass
class DataLoaderConfiguration:
    """How batches reach the processes.

    Attributes:
        split_batches: the loader's batch is that of all processes together, instead of each one's.
        dispatch_batches: the main process alone reads, and sends the others their share. None: each reads its own.
        even_batches: pad the last batch by repeating samples. Windlass shares the last batch out as it is, so that no
            sample counts twice; both values mean that.
        use_seedable_sampler: shuffle by a `SeedableRandomSampler`, in accelerate's very order. The order follows from
            a seed in any case.
        data_seed: the seed of that order; None draws one from torch's generator when the loader is prepared.
        non_blocking: batches are copied to the device without waiting; always so from pinned memory.
        use_stateful_dataloader: the loader's place is part of its `state_dict`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def objections(self) -> Iterator[Problem]:
        """What of these options has the wrong type."""
        yield from type_problems(self, data_seed=0)


@dataclass
class ProjectConfiguration:
    """Where a project's files lie.

    Attributes:
        project_dir: folder of the project.
        logging_dir: folder of trackers that write files; the project's own by default.
        automatic_checkpoint_naming: `save_state()` without a folder writes `checkpoints/checkpoint_N`.
        total_limit: how many of those are kept.
        iteration: N of the next one.
        save_on_each_node: every machine keeps files of its own, instead of the first one's.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Put the project into `project_dir`, and its logs as well unless they have a place of their own."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def objections(self) -> Iterator[Problem]:
        """What of these options has the wrong type."""
        yield from type_problems(self, iteration=0)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How many micro-batches make one update.

    Attributes:
        num_steps: that number.
        adjust_scheduler: a prepared schedule counts micro-batches, as one built for the plain loop does.
        sync_with_dataloader: the end of a loader ends an update.
        sync_each_batch: reduce gradients after every micro-batch, which saves memory and costs time.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How the model is compiled.

    Names of backends may have any case; None and "no" compile nothing.

    Attributes:
    """

    backend: DynamoBackend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        self.backend = DynamoBackend(str(self.backend or "no").upper())
        self.mode = self.mode or "default"
        self.fullgraph = False if self.fullgraph is None else self.fullgraph
        regional = self.use_regional_compilation
        self.use_regional_compilation = False if regional is None else regional

    def to_dict(self) -> dict[str, Any]:
        """All options, the backend as the compiler spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The options of `torch.compile` that differ from the defaults."""
        changed = super().to_kwargs()
        changed.pop("use_regional_compilation", None)
        return changed

    def objections(self) -> Iterator[Problem]:
        yield from type_problems(self)
        if self.mode not in COMPILE_MODES:
            yield Problem("TorchDynamoPlugin.mode", self.mode, f"must be one of {', '.join(COMPILE_MODES)}")


described(TorchDynamoPlugin, "dynamo_config")
