# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Configuration objects of a user-owned loop, under the names and with the defaults that scripts know.

They are data: making one reads no environment variable and touches no device. Their `objections()` list what is wrong
or cannot be honoured when they are used, so that everything is raised together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from windlass.config.parallel import rows_loop as rows
from windlass.config.parallel.keys import setting_of
from windlass.config.parallel.rows_training import ACCUMULATION
from windlass.config.plugin_base import KwargsHandler, Options, described, launched
from windlass.config.plugin_words import DDPCommunicationHookType, DynamoBackend
from windlass.config.sections.setting import Range, above, at_least, setting
from windlass.core.errors import Problem

_ACTIVITIES = ("cpu", "xpu", "mtia", "cuda", "hpu")


@described()
@dataclass
class AutocastKwargs(KwargsHandler):
    """Mixed precision of forward passes."""

    enabled: bool = setting(True, "False computes in the dtype of the weights.")
    cache_enabled: bool | None = setting(None, "Keep cast weights in the context; None: PyTorch's default.")


@described()
@dataclass
class GradScalerKwargs(KwargsHandler):
    """The loss scale of fp16."""

    init_scale: float = setting(65536.0, "The initial scale.", bounds=above(0))
    growth_factor: float = setting(2.0, "Factor after `growth_interval` finite updates.", bounds=above(1))
    backoff_factor: float = setting(
        0.5, "Factor after an overflow.", bounds=Range(lambda v: 0 < v < 1, "must lie between 0 and 1")
    )
    growth_interval: int = setting(2000, "Finite updates in a row until the scale grows.", bounds=at_least(1))
    enabled: bool = setting(True, "False does not scale the loss.")


@described()
@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the processes of a job connect."""

    backend: str | None = setting(
        "nccl", "Communication library; the default selects the one for the device (gloo on a CPU)."
    )
    init_method: str | None = setting(
        None, "Address to meet at; None reads `MASTER_ADDR` and `MASTER_PORT`, which launchers set."
    )
    timeout: timedelta | None = setting(
        None,
        "How long a process waits for the others; None is ten minutes with nccl and thirty otherwise.",
        bounds=Range(lambda v: v > timedelta(0), "must be above zero"),
    )

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)


@described()
@dataclass
class ProfileKwargs(KwargsHandler):
    """What `accelerator.profile()` records.

    Attributes:
        on_trace_ready: called with the profiler at the end of each cycle of the schedule.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: what is recorded of each operation.
    """

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = setting(
        None, "Kinds of work to record; None records all that are available.", words=_ACTIVITIES
    )
    schedule_option: dict[str, int] | None = setting(
        None,
        "Phases, in calls of the profiler's `step`.",
        words=("wait", "warmup", "active", "repeat", "skip_first"),
    )
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = setting(None, "Folder for one Chrome trace per process; None writes none.")


@described("ddp_config")
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How a model is replicated."""

    dim: int = setting(
        0,
        "The axis of the batch.",
        refused="must be 0: batches are distributed along their first axis",
    )
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = setting(
        False,
        "Without effect in PyTorch.",
        refused="has no effect in current PyTorch versions; leave it out",
    )
    gradient_as_bucket_view: bool = setting(
        False, "Gradients are views of the communication buckets; both values mean that."
    )
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)


@described("fp8_config")
@dataclass
class AORecipeKwargs(KwargsHandler):
    """How linear layers multiply in float8, through torchao; with `mixed_precision="fp8"`.

    Attributes:
        config: a `torchao.float8.Float8LinearConfig`, which replaces all other options.
        module_filter_func: function (module, its name) -> True for linear layers to convert; by default all except the
            first and the last. Sizes that are not multiples of 16 are left as they are in any case.
        pad_inner_dim: pad the number of tokens to the multiple of 16 that the kernels need; None means True.
        enable_fsdp_float8_all_gather: no effect: sharded parameters are gathered in bf16, with the same results.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp"; None: that of the launcher, or "tensorwise".
        emulate: True computes without the hardware, for tests.
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    recipe: str | None = field(default=None, kw_only=True)
    emulate: bool | None = field(default=None, kw_only=True)

    def settings(self) -> dict[str, Any]:
        """What was set, under the names of a launch file."""
        config = self.config
        said = {name: getattr(self, name) for name in _FLOAT8_WORDS} if config is None else {}
        if config is not None:
            gathers = getattr(config, "enable_fsdp_float8_all_gather", False)
            said = {"emulate": config.emulate, "enable_fsdp_float8_all_gather": gathers}
        return {name: value for name, value in said.items() if value is not None}

    def objections(self) -> Iterator[Problem]:
        """Problems of these options."""
        if self.config is None:
            return
        if type(self.config).__name__ != "Float8LinearConfig":
            fix = "must be a torchao.float8.Float8LinearConfig; set recipe= for one of its recipes by name"
            yield Problem("AORecipeKwargs.config", self.config, fix)
        for name in _FLOAT8_WORDS:
            if getattr(self, name) is not None:
                fix = "is part of config=, which is given too; set it there"
                yield Problem(f"AORecipeKwargs.{name}", getattr(self, name), fix)


_FLOAT8_WORDS = ("pad_inner_dim", "enable_fsdp_float8_all_gather", "recipe", "emulate")


@described()
@dataclass
class DataLoaderConfiguration(Options):
    """How batches are distributed to processes."""

    split_batches: bool = setting_of(rows.SPLIT_BATCHES)
    dispatch_batches: bool | None = setting_of(rows.DISPATCH_BATCHES)
    even_batches: bool = setting_of(rows.EVEN_BATCHES)
    use_seedable_sampler: bool = setting_of(rows.SEEDABLE_SAMPLER)
    data_seed: int | None = setting_of(rows.DATA_SEED)
    non_blocking: bool = setting_of(rows.NON_BLOCKING)
    use_stateful_dataloader: bool = setting_of(rows.STATEFUL)


@described()
@dataclass
class ProjectConfiguration(Options):
    """Where the files of a project are."""

    project_dir: str | None = setting(None, "Folder of the project.")
    logging_dir: str | None = setting(None, "Folder of trackers that write files; by default `project_dir`.")
    automatic_checkpoint_naming: bool = setting(False, "`save_state()` writes `checkpoints/checkpoint_N`.")
    total_limit: int | None = setting(None, "How many of those are kept.", bounds=at_least(1))
    iteration: int = setting(0, "N of the next one.", bounds=at_least(0))
    save_on_each_node: bool = setting(False, "Each machine keeps its own files.")

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the folder of the project, and that of its logs unless it is set already."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@described()
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches make an update."""

    num_steps: int | None = setting_of(ACCUMULATION)
    adjust_scheduler: bool = setting_of(rows.ADJUST_SCHEDULER)
    sync_with_dataloader: bool = setting_of(rows.SYNC_AT_END)
    sync_each_batch: bool = setting_of(rows.SYNC_EACH_BATCH)


@described("dynamo_config")
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How the model is compiled. Names of backends may have any case; "no" compiles nothing.

    Fields that are None are read from the variables `ACCELERATE_DYNAMO_*` of the launcher.
    """

    backend: DynamoBackend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        launcher = launched("dynamo")
        for name, word in _DYNAMO_WORDS.items():
            if getattr(self, name) is None:
                setattr(self, name, launcher.get(word, _NO_DYNAMO[name]))
        self.backend = DynamoBackend(str(self.backend).upper())

    def to_dict(self) -> dict[str, Any]:
        """All options, with the backend in the compiler's spelling."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The options of `torch.compile` that differ from the defaults."""
        changed = {name: value for name, value in self.to_dict().items() if value != _NO_DYNAMO[name]}
        changed.pop("use_regional_compilation", None)
        return changed


# Fields that a launcher sets -> the word in its variables.
_DYNAMO_WORDS = {
    "backend": "backend", "mode": "mode", "fullgraph": "use_fullgraph", "dynamic": "use_dynamic",
    "use_regional_compilation": "use_regional_compilation",
}  # fmt: skip
_NO_DYNAMO: dict[str, Any] = {
    "backend": "no", "mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False,
    "use_regional_compilation": False,
}  # fmt: skip
