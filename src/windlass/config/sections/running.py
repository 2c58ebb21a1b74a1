# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Where a run happens and how its data reach it: seeds, hardware, loaders, process groups, script switches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.config.enums import DebugOption
from windlass.config.quantities import seconds, size_in_bytes
from windlass.config.sections.setting import OWN_OUTPUT, POSITIVE, READING, at_least, setting

_SCRIPTS = "read by scripts, never by the Trainer"
SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")


@dataclass(repr=False, eq=False)
class SeedSection:
    full_determinism: bool = setting(False, "Deterministic kernels everywhere; slower.")
    seed: int = setting(42, "Seed of everything random.", bounds=at_least(0))
    data_seed: int | None = setting(None, "Seed of the order of samples; not said: seed.", bounds=at_least(0))


@dataclass(repr=False, eq=False)
class HardwareSection:
    use_cpu: bool = setting(False, "Train on the CPU although there is an accelerator.")
    accelerator_config: dict[str, Any] | str | None = setting(
        None, "Loader options: a dict, JSON, a JSON file, or a dataclass.", document=True
    )
    parallelism_config: Any = setting(
        None,
        "Tensor, context and sequence parallelism.",
        mapped="gives the numbers of copies and of shards; other axes than those two are refused",
    )


@dataclass(repr=False, eq=False)
class DataSection:
    dataloader_drop_last: bool = setting(False, "Leave out the last incomplete batch.")
    dataloader_num_workers: int = setting(
        0, "Processes that load data; 0 loads in the training process.", bounds=at_least(0), per_rank=READING
    )
    dataloader_pin_memory: bool = setting(True, "Pin batches in host memory.", per_rank=READING)
    dataloader_persistent_workers: bool = setting(
        False, "Keep loader processes alive between epochs.", per_rank=READING
    )
    dataloader_prefetch_factor: int | None = setting(
        None, "Batches that each loader process keeps ready.", bounds=at_least(1), per_rank=READING
    )
    dataloader_multiprocessing_context: str | None = setting(
        None,
        "How loader processes start: fork, spawn, forkserver.",
        words=("fork", "spawn", "forkserver"),
        per_rank=READING,
    )
    dataloader_in_order: bool = setting(
        True, "Take batches from loader processes in order.", per_rank=READING
    )
    remove_unused_columns: bool = setting(True, "Leave out columns that the model's forward does not name.")
    label_names: list[str] | None = setting(None, "Columns that hold labels.")
    train_sampling_strategy: str = setting(
        "random", "Order of training samples.", choices=SAMPLING_STRATEGIES
    )
    length_column_name: str = setting("length", "Column that holds lengths, for group_by_length.")


@dataclass(repr=False, eq=False)
class DistributedSection:
    ddp_find_unused_parameters: bool | None = setting(None, "Let DDP look for parameters without gradients.")
    ddp_bucket_cap_mb: int | None = setting(
        None, "Size of DDP's gradient buckets in MiB.", bounds=at_least(1)
    )
    ddp_broadcast_buffers: bool | None = setting(None, "Let DDP broadcast buffers from the first process.")
    ddp_static_graph: bool | None = setting(None, "Tell DDP that the graph never changes.")
    ddp_backend: str | None = setting(None, "Process-group backend; not said: the one for the device.")
    ddp_timeout: int = setting(
        1800,
        "Seconds before a collective gives up, and a process that waits for data or for a background save.",
        bounds=POSITIVE,
        per_rank="how long this process waits",
    )


@dataclass(repr=False, eq=False)
class ShardingSection:
    fsdp: bool | str | list[str] | None = setting(None, "Fully sharded data parallelism.")
    fsdp_config: dict[str, Any] | str | None = setting(
        None, "Options of sharding: a dict, JSON, or a JSON file.", document=True
    )
    deepspeed: dict[str, Any] | str | None = setting(
        None,
        "DeepSpeed configuration: a dict, JSON, or a JSON file.",
        document=True,
        refused="is not built yet; fsdp=True shards parameters, gradients and optimizer state",
    )


@dataclass(repr=False, eq=False)
class DebugSection:
    debug: str | list[DebugOption] = setting(
        "",
        "Debugging aids: underflow_overflow.",
        per_rank=OWN_OUTPUT,
        refused="is not built yet; nonfinite_policy says which step and which samples went wrong",
    )
    skip_memory_metrics: bool = setting(True, "Leave memory figures out of the metrics.")


@dataclass(repr=False, eq=False)
class ScriptSection:
    do_train: bool = setting(False, "For scripts: train.", per_rank=_SCRIPTS)
    do_eval: bool = setting(False, "For scripts: evaluate on the validation set.", per_rank=_SCRIPTS)
    do_predict: bool = setting(False, "For scripts: predict on the test set.", per_rank=_SCRIPTS)


@dataclass(repr=False, eq=False)
class ProcessSection:
    local_rank: int = setting(
        -1,
        "Set by old launchers; the environment says the same and is read instead.",
        per_rank="the place of this process on its machine",
        mapped="is read from the launcher's environment; a value that disagrees is refused",
    )


@dataclass(repr=False, eq=False)
class WindlassSection:
    nonfinite_policy: str = setting(
        "raise", "What a NaN or infinite loss or gradient norm does.", choices=("raise", "skip", "rollback")
    )
    global_batch_size: int | None = setting(
        None, "Samples of an update over all processes; accumulation follows from it."
    )
    preemption_signals: str = setting(
        "SIGTERM SIGUSR1", "Signals on which a run saves and leaves with exit code 75; 'none' for none."
    )
    preemption_deadline: str | float | None = setting(
        None,
        "Time after such a signal, like '60s', after which the process leaves whatever it has saved.",
        read=seconds,
    )
    dataloader_start_timeout: float = setting(
        30.0,
        "Seconds after which a loader process that was forked and has not started is replaced.",
        bounds=POSITIVE,
    )
    keep_last: int | None = setting(
        None, "Newest checkpoints to keep, whatever the best are.", bounds=at_least(1)
    )
    keep_best: int | None = setting(
        None,
        "Best checkpoints to keep by metric_for_best_model; each is saved when it is evaluated.",
        bounds=at_least(1),
    )
    save_every: str | float | None = setting(
        None, "Time between further checkpoints, like '5min'; of these only the newest is kept.", read=seconds
    )
    max_save_failures: int | None = setting(
        10,
        "Failed saves in a row, each after a growing pause, at which training ends; None: it goes on regardless.",
    )
    save_in_background: bool = setting(True, "Write checkpoints while training goes on.")
    save_host_memory: str | float | None = setting(
        None,
        "Most host memory that copies of a save under way may take, like '8GB'; larger saves stop training.",
        read=size_in_bytes,
        per_rank="memory of this machine alone",
    )
