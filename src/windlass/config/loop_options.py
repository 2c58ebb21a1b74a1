# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Configuration objects of a user-owned loop, under the names and with the defaults that scripts know.

They are data: making one reads no environment variable and touches no device. Their `objections()` list what is wrong
or cannot be honoured when they are used, so that everything is raised together.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal

from windlass.config.kinds import as_path
from windlass.config.parallel import rows_loop as rows
from windlass.config.parallel.keys import setting_of
from windlass.config.parallel.rows_training import ACCUMULATION
from windlass.config.sections.setting import Range, above, at_least, described, rules_in, setting
from windlass.config.values import stated, wrong_values
from windlass.core.errors import Problem


class Options:
    """A dataclass of options. Those that `setting` declares are checked on use, not on construction."""

    def objections(self) -> Iterator[Problem]:
        """Problems of these options."""
        # Others are settings, which are checked when they are recorded.
        declared = {field.name: rules_in(field) for field in dataclasses.fields(self) if field.metadata}  # type: ignore[arg-type]
        for found in wrong_values(self, declared):
            yield dataclasses.replace(found, field=f"{type(self).__name__}.{found.field}")


class KwargsHandler(Options):
    """A group of options that can list those which differ from the defaults.

    Attributes:
        handles: its part in `accelerator.loop_settings.Handlers`; empty for classes that are no handlers.
    """

    handles: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """All options, as copies."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        return copy.deepcopy(stated(self))


class Plugin:
    """An object of options, of a class that scripts know from another library, which they pass to `Accelerator`.

    `config.parallel.from_plugins` reads what its `settings()` returns, or its fields. The classes are in `compat/`.
    """

    argument: ClassVar[str]  # the argument of `Accelerator` that takes it

    def objections(self) -> Iterator[Problem]:
        """Problems of these options."""
        return iter(())


_ACTIVITIES = ("cpu", "xpu", "mtia", "cuda", "hpu")


@described()
@dataclass
class AutocastKwargs(KwargsHandler):
    """Mixed precision of forward passes."""

    handles = "autocast"

    enabled: bool = setting(True, "False computes in the dtype of the weights.")
    cache_enabled: bool | None = setting(None, "Keep cast weights in the context; None: from torch 2.11 on.")


@described()
@dataclass
class GradScalerKwargs(KwargsHandler):
    """The loss scale of fp16."""

    handles = "scaler"

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

    handles = "init"

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

    handles = "profile"

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
        self.logging_dir = as_path(self.logging_dir)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set `project_dir`, also as `logging_dir` unless that is set already."""
        self.project_dir = as_path(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


@described()
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches make an update."""

    num_steps: int | None = setting_of(ACCUMULATION)
    adjust_scheduler: bool = setting_of(rows.ADJUST_SCHEDULER)
    sync_with_dataloader: bool = setting_of(rows.SYNC_AT_END)
    sync_each_batch: bool = setting_of(rows.SYNC_EACH_BATCH)
