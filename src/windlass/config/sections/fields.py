# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""All fields of `TrainingArguments`, each with everything that holds for it alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from windlass.config import accelerator_config, kinds
from windlass.config.enums import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from windlass.config.parallel import rows_compute
from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.keys import setting_of
from windlass.config.sections.setting import (
    BELOW_ONE,
    FINITE,
    INTERVAL,
    OWN_DISK,
    OWN_OUTPUT,
    READING,
    SEED,
    STRIDE,
    Range,
    Truth,
    above,
    at_least,
    setting,
)

LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")
TRAINED_SCHEME = "trained"  # that of the run that saved a checkpoint
QAT_SCHEMES = {  # of `qat`: what linear layers round to
    "int8": "weights of 8 bits, a scale per output, and inputs of 8 bits, a scale per token",
    "int4": "weights of 4 bits, a scale per 32 of them, and inputs of 8 bits, a scale per token",
    "int8_weight_only": "weights of 8 bits, a scale per output",
    "int4_weight_only": "weights of 4 bits, a scale per 32 of them",
    "float8": "weights and inputs in float8, a scale per output and per token",
}
# May differ between ranks: what this process reports, how fast this machine reads, what only scripts read.
_reported = partial(setting, per_rank=OWN_OUTPUT)
_reading = partial(setting, per_rank=READING)
_script = partial(setting, per_rank="read by scripts, not by the Trainer")
_interval = partial(setting, bounds=INTERVAL)
_document = partial(setting, None, document=True)
_hub = partial(setting, per_rank="only the main process uploads")
# `--activation_checkpointing` without a value means True, although the default is None (not set).
_SWITCH: dict[str, Any] = {"nargs": "?", "const": True}


def _folder(value: Any) -> Any:
    path = kinds.as_path("trainer_output" if value is None else value)
    return os.path.expanduser(path) if isinstance(path, str) else path


def _aids(value: Any) -> Any:
    words = value.split() if isinstance(value, str) else [] if value is None else value
    return [kinds.as_declared(word, (DebugOption,)) for word in words] if isinstance(words, list) else words


@dataclass(repr=False, eq=False)
class OptimisationSection:
    """The length of a run, the schedule and the optimizer."""

    # --- length of the run ---
    output_dir: str | None = setting(
        None,
        "Folder of checkpoints, logs and the report of this run; by default 'trainer_output'.",
        per_rank=OWN_DISK,
        form=_folder,
    )
    per_device_train_batch_size: int = setting(8, "Samples per process and forward.", bounds=at_least(1))
    num_train_epochs: float = setting(3.0, "Passes over the training data.", bounds=FINITE)
    max_steps: int = setting(
        -1,
        "Number of updates; a positive number overrides num_train_epochs.",
        bounds=at_least(-1, "; -1 uses num_train_epochs"),
    )

    # --- schedule ---
    learning_rate: float = setting(5e-5, "Learning rate at the end of warm-up.", bounds=at_least(0))
    lr_scheduler_type: SchedulerType | str = setting("linear", "Schedule of the learning rate after warm-up.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = _document(
        "Options of the schedule: a dict, JSON, or a JSON file."
    )
    warmup_steps: float = setting(0, "Updates of linear warm-up; below 1 a share of all.", bounds=STRIDE)

    # --- optimizer ---
    optim: OptimizerNames | str = setting("adamw_torch_fused", "The optimizer.")
    optim_args: str | None = setting(
        None, "Options of the optimizer: 'name=value, name=value'.", read=kinds.options_from
    )
    weight_decay: float = setting(0.0, "Decoupled weight decay; not of norms and biases.", bounds=at_least(0))
    adam_beta1: float = setting(0.9, "Decay of the first moment in Adam optimizers.", bounds=BELOW_ONE)
    adam_beta2: float = setting(0.999, "Decay of the second moment in Adam optimizers.", bounds=BELOW_ONE)
    adam_epsilon: float = setting(1e-8, "Added to the denominator in Adam optimizers.", bounds=at_least(0))
    optim_target_modules: list[str] | str | None = setting(
        None,
        "Linear layers whose gradients GaLore and APOLLO project: parts of module names, a regular expression, or "
        "'all-linear'.",
    )

    # --- update ---
    gradient_accumulation_steps: int = setting_of(rows.ACCUMULATION, 1, bounds=at_least(1))
    average_tokens_across_devices: bool = setting(
        True, "Normalise the loss by all processes' targets.", mapped="is always on; several refuse False"
    )
    max_grad_norm: float = setting(
        1.0,
        "Clip the global gradient norm to this value; 0 disables clipping.",
        bounds=Range(lambda v: v >= 0, "must be at least 0; 0 disables clipping"),
    )
    label_smoothing_factor: float = setting(
        0.0,
        "Share of probability that is distributed evenly over all classes, in [0, 1).",
        bounds=BELOW_ONE,
    )


@dataclass(repr=False, eq=False)
class ComputeSection:
    """Precision, recomputation, compilation and memory: how an update is computed."""

    # --- precision ---
    bf16: bool = setting(False, "Train in bfloat16 mixed precision.")
    fp16: bool = setting(False, "Train in float16 mixed precision, with a loss scaler.")
    bf16_full_eval: bool = setting(False, "Evaluate with the weights cast to bfloat16.")
    fp16_full_eval: bool = setting(False, "Evaluate with the weights cast to float16.")
    tf32: bool | None = setting(None, "Allow TF32 in float32 matrix products; by default PyTorch's setting.")

    # --- recomputation ---
    activation_checkpointing: bool | None = setting(None, "Recompute activations in the backward.", **_SWITCH)
    activation_checkpointing_kwargs: dict[str, Any] | str | None = _document(
        "Options of recomputation, such as every_n_layers: a dict, JSON, or a JSON file."
    )
    gradient_checkpointing: bool | None = setting(
        None,
        "Earlier name of activation_checkpointing.",
        **_SWITCH,
        mapped="is the earlier name of activation_checkpointing; setting either sets both",
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Earlier name of activation_checkpointing_kwargs.",
        document=True,
        mapped="is the earlier name of activation_checkpointing_kwargs; setting either sets both",
    )

    # --- compilation ---
    torch_compile: bool = setting(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = setting_of(rows_compute.COMPILE_BACKEND, None)
    torch_compile_mode: str | None = setting(
        None, "Mode of torch.compile; setting it enables compilation.", words=rows_compute.COMPILE_MODES
    )

    # --- kernels ---
    use_liger_kernel: bool = setting(
        False, "On GPUs replace parts of the model by Liger's kernels (package liger_kernel)."
    )
    liger_kernel_config: dict[str, bool] | None = _document(
        "Which of Liger's kernels; by default those that it chooses for the model."
    )

    # --- memory ---
    use_cache: bool = setting(False, "Keep the key/value cache of the model during training.")
    neftune_noise_alpha: float | None = setting(
        None, "Scale of NEFTune noise on the input embeddings during training.", bounds=at_least(0)
    )
    torch_empty_cache_steps: int | None = setting(
        None,
        "Updates between two releases of cached device memory.",
        bounds=at_least(1),
        per_rank="memory of this process only",
    )
    auto_find_batch_size: bool = setting(
        False, "Reduce the micro-batch size until it fits in memory; updates keep their samples."
    )


@dataclass(repr=False, eq=False)
class ReportingSection:
    """Logs and experiment trackers."""

    # --- logs ---
    logging_strategy: IntervalStrategy | str = setting("steps", "When to log.")
    logging_steps: float = _interval(500, "Updates between logs; below 1 a share of them all.")
    logging_first_step: bool = setting(False, "Log the first update too.")
    log_on_each_node: bool = _reported(
        True, "Log on the first process of each machine, instead of only on that of the job."
    )
    logging_nan_inf_filter: bool = setting(
        True,
        "Accepted for old scripts; non-finite losses are always logged.",
        mapped="filters nothing: non-finite losses are logged as they are, and nonfinite_policy decides",
        noted_at=True,
    )
    include_num_input_tokens_seen: str | bool = setting(
        "no",
        "Count input tokens: all, non_padding or no.",
        words=("all", "non_padding", "no"),
        form=lambda value: ("no", "all")[value] if isinstance(value, bool) else value,
    )
    log_level: str = _reported(
        "passive",
        "Log level of the main process ('passive' leaves it, by default at warning).",
        choices=LOG_LEVELS,
    )
    log_level_replica: str = _reported(
        "warning", "Log level of the other processes ('passive' is warning).", choices=LOG_LEVELS
    )
    disable_tqdm: bool | None = _reported(
        None, "Disable the progress bar; by default if only errors are logged."
    )

    # --- trackers ---
    report_to: list[str] | str | None = _reported(
        "none",
        "Trackers that receive the logs; 'report' writes report.html and training.png.",
        form=lambda value: [] if value in (None, "none", ["none"], "") else kinds.as_list(value),
    )
    run_name: str | None = _reported(None, "A name for the run.")
    project: str = _reported("huggingface", "Project name for trackers.")
    trackio_space_id: str | None = _reported(None, "Space that shows trackio logs.")
    trackio_bucket_id: str | None = _reported(None, "Bucket that holds trackio logs.")
    trackio_static_space_id: Literal[False] | str | None = _reported(
        None,
        "Static space of trackio logs.",
        refused="is not built; trackio.freeze(...) after training makes a static space",
    )


@dataclass(repr=False, eq=False)
class EvaluationSection:
    """When and how a model is evaluated."""

    eval_strategy: IntervalStrategy | str = setting("no", "When to evaluate during training.")
    eval_steps: float | None = _interval(
        None, "Updates between evaluations; below 1 a share of all updates; by default logging_steps."
    )
    eval_delay: float = setting(0, "Epochs or updates before the first evaluation.", bounds=at_least(0))
    per_device_eval_batch_size: int = setting(
        8, "Samples per process and evaluation batch.", bounds=at_least(1)
    )
    prediction_loss_only: bool = setting(False, "Evaluate the loss only; keep no predictions.")
    eval_on_start: bool = setting(False, "Evaluate once before the first update.")
    eval_do_concat_batches: bool = setting(True, "Concatenate batches; otherwise keep a list of them.")
    eval_use_gather_object: bool = setting(
        False,
        "Gather nested Python objects from all processes.",
        mapped="is always so: tensors, arrays and numbers in nested tuples, lists and dicts are gathered; "
        "with eval_do_concat_batches=False batches stay apart",
    )
    eval_accumulation_steps: int | None = setting(
        None, "Batches after which predictions are moved to host memory.", bounds=at_least(1)
    )
    include_for_metrics: list[str] = setting(
        [],
        "Additional inputs of compute_metrics: inputs, loss.",
        words=("inputs", "loss"),
        form=kinds.as_list,
    )
    batch_eval_metrics: bool = setting(False, "Call compute_metrics for each batch and keep no predictions.")


@dataclass(repr=False, eq=False)
class SavingSection:
    """When checkpoints are written, which are kept and published, and how a run resumes."""

    # --- checkpoints ---
    save_only_model: bool = setting(False, "Save the model without what resuming needs.")
    save_strategy: SaveStrategy | str = setting("steps", "When to save a checkpoint.")
    save_steps: float = _interval(500, "Updates between checkpoints; below 1 a share of all.")
    save_on_each_node: bool = setting(
        False,
        "Write the final model on every machine that has its own disk.",
        mapped="applies to the final model: checkpoints are always written on every disk",
    )
    save_total_limit: int | None = setting(
        None,
        "Checkpoints to keep; always the best and the last.",
        form=lambda value: None if isinstance(value, int) and value <= 0 else value,
    )
    enable_jit_checkpoint: bool = setting(
        False,
        "Save immediately when the scheduler asks the job to stop.",
        mapped="is always on: a run saves and exits on the signals in preemption_signals",
    )

    # --- hub ---
    push_to_hub: bool = _hub(False, "Publish the model on the Hub.")
    hub_token: str | None = setting(
        None,
        "Token for the Hub; never written to a file or log.",
        secret=True,
        # Written arguments have a placeholder instead of the secret.
        form=lambda value: None if value == "<HUB_TOKEN>" else value,
        per_rank="a secret, which never leaves its process; only the main process uploads",
    )
    hub_private_repo: bool | None = _hub(None, "Make a new repository private; None for the owner's default.")
    hub_model_id: str | None = _hub(None, "Repository on the Hub; the output folder's name by default.")
    hub_strategy: HubStrategy | str = _hub("every_save", "What is published, and when.")
    hub_always_push: bool = _hub(
        False, "Publish every save; otherwise one that still waits for an upload is replaced by the next."
    )
    hub_revision: str | None = _hub(None, "Branch on the Hub; it is created if it does not exist.")

    # --- best checkpoint ---
    load_best_model_at_end: bool = setting(False, "Load the weights of the best evaluation after training.")
    metric_for_best_model: str | None = setting(None, "Metric of the best, with or without 'eval_'.")
    greater_is_better: bool | None = setting(None, "By default True unless the metric's name ends in 'loss'.")

    # --- resuming ---
    ignore_data_skip: bool = setting(
        False, "A resumed run begins its epoch again, instead of continuing in it where the checkpoint was."
    )
    restore_callback_states_from_checkpoint: bool = setting(False, "Also restore the settings of callbacks.")


@dataclass(repr=False, eq=False)
class RunningSection:
    """Seeds, hardware, data loading, process groups, sharding, and the settings that only Windlass has."""

    # --- seeds ---
    full_determinism: bool = setting(False, "Deterministic kernels everywhere; slower.")
    seed: int = setting(42, "Seed of all random generators.", bounds=SEED)
    data_seed: int | None = setting(None, "Seed of the order of samples; else `seed`.", bounds=SEED)

    # --- hardware ---
    use_cpu: bool = setting_of(rows.CPU)
    accelerator_config: dict[str, Any] | str | None = setting(
        None,
        "Loader options: a dict, JSON, a JSON file, or a dataclass.",
        document=True,
        form=accelerator_config.read,
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
    label_names: list[str] | None = setting(None, "Columns that contain labels.", form=kinds.as_list)
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
    fsdp_config: dict[str, Any] | str | None = _document("Options of sharding: a dict, JSON, or a JSON file.")
    deepspeed: dict[str, Any] | str | None = _document(
        "DeepSpeed configuration: a dict, JSON, or a JSON file."
    )

    # --- debugging ---
    debug: str | list[DebugOption] = setting(
        "",
        "underflow_overflow: stop in the first forward of a module whose weights or output are not finite. Slow.",
        form=_aids,
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
        form=kinds.as_path,
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
    qat: str | None = setting(
        None,
        "Train for weights of few bits: int8, int4, int8_weight_only, int4_weight_only or float8 (torchao).",
        words=tuple(QAT_SCHEMES),
    )
    optim_groups: dict[str, Any] | str | None = _document(
        "Options of parameters by name: a dict, JSON, or a JSON file, as {'embed': {'lr': 1e-4, 'weight_decay': 0}}. "
        "A key is a regular expression that is searched for in the names."
    )
    layerwise_lr_decay: float = setting(
        1.0,
        "The learning rate of a layer is that of the layer above times this.",
        bounds=Range(lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    )
    torch_compile_blocks: bool = setting_of(rows_compute.COMPILE_BLOCKS)
    fp8: bool = setting(
        False, "Multiply in float8 in linear layers, through torchao, and compute in bfloat16 elsewhere."
    )
    fp8_config: dict[str, Any] | str | None = _document(
        "Options of fp8, such as recipe: a dict, JSON, or a JSON file."
    )
    global_batch_size: int | None = setting(None, "Samples of an update over all processes.")
    preemption_signals: str = setting("SIGTERM SIGUSR1", "Signals on which a run saves and exits, or 'none'.")
    preemption_deadline: float | str | None = setting(
        None,
        "Time after such a signal, such as '60s', at which the process exits even if the save has not finished.",
        read=kinds.seconds,
    )
    hub_wait: float | str = setting(
        600.0,
        "How long a run that ends waits for its uploads to the Hub, in seconds or as '10min'; with several processes "
        "at most half of ddp_timeout.",
        read=kinds.seconds,
    )
    dataloader_start_timeout: float = setting(
        30.0, "Seconds after which a forked worker process that has not started is replaced.", bounds=above(0)
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
        read=kinds.seconds,
    )
    max_save_failures: int | None = setting(
        10,
        "Consecutive failed saves, each after a longer pause, that end training; None: no limit.",
        bounds=at_least(1, "; None for no limit"),
    )
    save_in_background: bool = setting(True, "Write checkpoints while training continues.")
    save_host_memory: float | str | None = setting(
        None,
        "Limit on host memory for copies of a save, such as '8GB'; larger saves block training.",
        read=kinds.size_in_bytes,
        per_rank="memory of this machine only",
    )
    lean_loss: bool = setting(
        True,
        "Make the loss of a language model without its logits if nothing reads them; see docs/losses.md.",
    )
    alerts: dict[str, Any] | str | None = _reported(
        None,
        "Limits that warn: loss_rise, data_wait and slow_rank as shares, no_checkpoint in seconds; a dict or JSON.",
        document=True,
    )


@dataclass(repr=False)
class Fields(
    # A dataclass has the fields of its last base first, so the sections are in reverse order: `output_dir` is first.
    RunningSection,
    SavingSection,
    EvaluationSection,
    ReportingSection,
    ComputeSection,
    OptimisationSection,
):
    """The sections together, for what reads the arguments below `TrainingArguments`."""
