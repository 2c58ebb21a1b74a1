# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Seeds, hardware, data loading, process groups, sharding, and the settings that only Windlass has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from windlass.config.enums import DebugOption
from windlass.config.parallel import rows_compile
from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.keys import setting_of
from windlass.config.quantities import seconds, size_in_bytes
from windlass.config.sections.setting import OWN_OUTPUT, READING, Range, Truth, above, at_least, setting

# What may differ between ranks: how fast this machine reads, and what only scripts read.
_reading = partial(setting, per_rank=READING)
_script = partial(setting, per_rank="read by scripts, not by the Trainer")
SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")


@dataclass(repr=False, eq=False)
class RunningSection:
    # --- seeds ---
    full_determinism: bool = setting(False, "Deterministic kernels everywhere; slower.")
    seed: int = setting(42, "Seed of all random generators.", bounds=at_least(0))
    data_seed: int | None = setting(None, "Seed of the order of samples; else `seed`.", bounds=at_least(0))

    # --- hardware ---
    use_cpu: bool = setting_of(rows.CPU)
    accelerator_config: dict[str, Any] | str | None = setting(
        None, "Loader options: a dict, JSON, a JSON file, or a dataclass.", document=True
    )
    parallelism_config: Any = setting(
        None,
        "Sizes of the axes that processes are divided along.",
        mapped="sets the numbers of model replicas and of shards; all other axes are refused",
    )

    # --- data ---
    dataloader_drop_last: bool = setting(False, "Drop the last incomplete batch.")
    dataloader_num_workers: int = _reading(
        0, "Worker processes that load data; 0 loads in the training process.", bounds=at_least(0)
    )
    dataloader_pin_memory: bool = _reading(True, "Pin batches in host memory.")
    dataloader_persistent_workers: bool = _reading(False, "Keep workers alive between epochs.")
    dataloader_prefetch_factor: int | None = _reading(
        None, "Batches that each worker process prefetches.", bounds=at_least(1)
    )
    dataloader_multiprocessing_context: str | None = _reading(
        None,
        "Start method of worker processes: fork, spawn, forkserver.",
        words=("fork", "spawn", "forkserver"),
    )
    dataloader_in_order: bool = _reading(True, "Take batches from workers in order.")
    remove_unused_columns: bool = setting(True, "Remove columns that the model's forward does not accept.")
    label_names: list[str] | None = setting(None, "Columns that contain labels.")
    train_sampling_strategy: str = setting("random", "Order of samples.", choices=SAMPLING_STRATEGIES)
    length_column_name: str = setting("length", "Column that contains lengths, for group_by_length.")

    # --- process group and DDP ---
    ddp_find_unused_parameters: bool | None = setting_of(rows.DDP_FIND_UNUSED, None)
    ddp_bucket_cap_mb: int | None = setting_of(rows.DDP_BUCKET)
    ddp_broadcast_buffers: bool | None = setting_of(rows.DDP_BUFFERS)
    ddp_static_graph: bool | None = setting_of(rows.DDP_STATIC, None)
    ddp_backend: str | None = setting(None, "Process-group backend; by default the one for the device.")
    ddp_timeout: int = setting_of(rows.DDP_TIMEOUT, per_rank="how long this process waits")

    # --- sharding ---
    fsdp: Truth | str | list[str] | None = setting(None, "Fully sharded data parallelism.")
    fsdp_config: dict[str, Any] | str | None = setting(
        None, "Options of sharding: a dict, JSON, or a JSON file.", document=True
    )
    deepspeed: dict[str, Any] | str | None = setting(
        None,
        "DeepSpeed configuration: a dict, JSON, or a JSON file.",
        document=True,
    )

    # --- debugging ---
    debug: str | list[DebugOption] = setting(
        "",
        "underflow_overflow: stop in the first forward of a module whose weights or output are not finite. Slow.",
        per_rank=OWN_OUTPUT,
    )
    skip_memory_metrics: bool = setting(True, "Do not report memory use in the metrics.")

    # --- of scripts ---
    do_train: bool = _script(False, "For scripts: train.")
    do_eval: bool = _script(False, "For scripts: evaluate on the validation set.")
    do_predict: bool = _script(False, "For scripts: predict on the test set.")
    resume_from_checkpoint: Truth | str | None = setting(
        None,
        "Checkpoint to resume from; True: the newest; 'auto': the newest, or a new run if there is none.",
        per_rank="compared when train() reads it, because an argument of train() may override it",
    )
    local_rank: int = setting(
        -1,
        "Set by old launchers; the environment is read instead.",
        per_rank="the index of this process on its machine",
        mapped="is read from the launcher's environment; a value that disagrees is refused",
    )

    # --- additions of Windlass ---
    nonfinite_policy: str = setting(
        "raise",
        "What to do about a NaN or infinite loss or gradient norm.",
        choices=("raise", "skip", "rollback"),
    )
    optim_groups: dict[str, Any] | str | None = setting(
        None,
        "Options of parameters by name: a dict, JSON, or a JSON file, as {'embed': {'lr': 1e-4, 'weight_decay': 0}}. "
        "A key is a regular expression that is searched for in the names.",
        document=True,
    )
    layerwise_lr_decay: float = setting(
        1.0,
        "The learning rate of a layer is that of the layer above times this.",
        bounds=Range(lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    )
    torch_compile_blocks: bool = setting_of(rows_compile.COMPILE_BLOCKS)
    fp8: bool = setting(
        False, "Multiply in float8 in linear layers, through torchao, and compute in bfloat16 elsewhere."
    )
    fp8_config: dict[str, Any] | str | None = setting(
        None, "Options of fp8, such as recipe: a dict, JSON, or a JSON file.", document=True
    )
    global_batch_size: int | None = setting(None, "Samples of an update over all processes.")
    preemption_signals: str = setting("SIGTERM SIGUSR1", "Signals on which a run saves and exits, or 'none'.")
    preemption_deadline: float | str | None = setting(
        None,
        "Time after such a signal, such as '60s', at which the process exits even if the save has not finished.",
        read=seconds,
    )
    hub_wait: float | str = setting(
        600.0,
        "How long a run that ends waits for its uploads to the Hub, in seconds or as '10min'.",
        read=seconds,
    )
    dataloader_start_timeout: float = setting(
        30.0,
        "Seconds after which a forked worker process that has not started is replaced.",
        bounds=above(0),
    )
    keep_last: int | None = setting(None, "Newest checkpoints to keep, besides the best.", bounds=at_least(1))
    keep_best: int | None = setting(
        None,
        "Number of best checkpoints to keep, by metric_for_best_model; each is saved when it is evaluated.",
        bounds=at_least(1),
    )
    save_every: float | str | None = setting(
        None,
        "Time between additional checkpoints, such as '5min'; only the newest of these is kept.",
        read=seconds,
    )
    max_save_failures: int | None = setting(
        10,
        "Consecutive failed saves, each after a longer pause, that end training; None: no limit.",
    )
    save_in_background: bool = setting(True, "Write checkpoints while training continues.")
    save_host_memory: float | str | None = setting(
        None,
        "Limit on host memory for copies of a save, such as '8GB'; larger saves block training.",
        read=size_in_bytes,
        per_rank="memory of this machine only",
    )
