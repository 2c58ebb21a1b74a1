"""Windlass trains and fine-tunes PyTorch models, and never lets the load slip back.

Every public name is here: `from windlass import Trainer, TrainingArguments`. Names are loaded on first use, so that
`import windlass` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from windlass.core.lazy import loader_of, reverse

__version__ = "0.1.0"

_HOMES = {
    "windlass.accelerator.accelerator": ("Accelerator",),
    "windlass.launchers": ("debug_launcher", "notebook_launcher"),
    "windlass.compat.batch_size": ("find_executable_batch_size",),
    "windlass.compat.seeds": ("synchronize_rng_states",),
    "windlass.compat.state": ("PartialState",),
    "windlass.trainer.trainer": ("Trainer",),
    "windlass.finetuning.seq2seq_trainer": ("Seq2SeqTrainer",),
    "windlass.finetuning.seq2seq_arguments": ("Seq2SeqTrainingArguments",),
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.config.sft": ("SFTConfig",),
    "windlass.finetuning.sft_trainer": ("SFTTrainer",),
    "windlass.finetuning.templates": ("clone_chat_template",),
    "windlass.finetuning.script_arguments": (
        "DatasetConfig", "DatasetMixtureConfig", "ModelConfig", "ScriptArguments",
    ),
    "windlass.finetuning.from_flags": (
        "get_dataset", "get_kbit_device_map", "get_peft_config", "get_quantization_config",
    ),
    "windlass.finetuning.trl_parser": ("TrlParser",),
    "windlass.config.plugins": (
        "AutocastKwargs", "DataLoaderConfiguration", "DistributedDataParallelKwargs", "GradScalerKwargs",
        "GradientAccumulationPlugin", "InitProcessGroupKwargs", "ProfileKwargs", "ProjectConfiguration",
        "TorchDynamoPlugin",
    ),
    "windlass.config.plugin_engines": ("DeepSpeedPlugin",),
    "windlass.config.plugin_fsdp": ("FullyShardedDataParallelPlugin",),
    "windlass.config.plugin_parallelism": ("ParallelismConfig",),
    "windlass.config.plugin_words": ("DDPCommunicationHookType", "DistributedType"),
    "windlass.config.parser": ("HfArgumentParser",),
    "windlass.config.enums": (
        "EvaluationStrategy", "HubStrategy", "IntervalStrategy", "OptimizerNames", "ParallelMode", "SaveStrategy",
        "SchedulerType",
    ),
    "windlass.core.types": (
        "EvalLoopOutput", "EvalPrediction", "LossTerms", "PredictionOutput", "TrainOutput",
    ),
    "windlass.core.events": ("TrainerCallback", "TrainerControl", "TrainerState"),
    "windlass.core.errors": (
        "CheckpointError", "ConfigError", "DataError", "MemoryShortError", "MissingDependencyError", "ModelError",
        "NonFiniteError", "Preempted", "RankMismatchError", "WindlassError",
    ),
    "windlass.core.rng": ("enable_full_determinism", "set_seed"),
    "windlass.callbacks.flow": ("DefaultFlowCallback",),
    "windlass.callbacks.early_stopping": ("EarlyStoppingCallback",),
    "windlass.callbacks.weight_averaging": ("EMACallback", "SWACallback"),
    "windlass.callbacks.printer": ("PrinterCallback",),
    "windlass.callbacks.progress": ("ProgressCallback",),
    "windlass.callbacks.notebook": ("NotebookProgressCallback",),
    "windlass.callbacks.metrics_log": ("MetricsLogCallback", "read_metrics"),
    "windlass.callbacks.report": ("ReportCallback",),
    "windlass.data": (
        "DataCollatorForLanguageModeling", "DataCollatorForMultipleChoice",
        "DataCollatorForPermutationLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorForTokenClassification",
        "DataCollatorWithFlattening", "DataCollatorWithPadding", "DefaultDataCollator", "default_data_collator",
    ),
    "windlass.text.packing": ("pack_dataset",),
    "windlass.data.skip": ("skip_first_batches",),
    "windlass.optim.public": (
        "get_constant_schedule", "get_constant_schedule_with_warmup", "get_cosine_schedule_with_warmup",
        "get_cosine_with_hard_restarts_schedule_with_warmup", "get_cosine_with_min_lr_schedule_with_warmup",
        "get_inverse_sqrt_schedule", "get_linear_schedule_with_warmup", "get_polynomial_decay_schedule_with_warmup",
        "get_scheduler", "get_wsd_schedule", "get_greedy_schedule", "get_reduce_on_plateau_schedule",
        "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    ),
    "windlass.optim.optimizers.adafactor": ("Adafactor",),
    "windlass.optim.optimizers.adalomo": ("AdaLomo",),
    "windlass.optim.optimizers.galore_adafactor": ("GaLoreAdafactor",),
    "windlass.optim.optimizers.apollo_adamw": ("ApolloAdamW",),
    "windlass.optim.optimizers.galore_adamw": ("GaLoreAdamW",),
    "windlass.optim.optimizers.galore_adamw_8bit": ("GaLoreAdamW8bit",),
    "windlass.optim.optimizers.lomo": ("Lomo",),
    "windlass.optim.schedules.greedy": ("GreedyLR",),
    "windlass.text.conversations": (
        "apply_chat_template", "extract_prompt", "get_training_chat_template", "is_conversational",
        "is_conversational_from_value", "maybe_apply_chat_template", "maybe_convert_to_chatml", "maybe_extract_prompt",
        "maybe_unpair_preference_dataset", "supports_tool_calling", "unpair_preference_dataset",
    ),
    "windlass.text.mixture": ("DatasetMixture",),
    "windlass.text.prepare_text": ("PreparedText", "prepare_text"),
    "windlass.text.text_options": ("TextOptions",),
    "windlass.utils.imports": ("is_rich_available",),
    "windlass.checkpoint.weights": ("load_weights", "save_weights"),
    "windlass.compat.meta": ("init_empty_weights", "init_on_device"),
    "windlass.compat.auto_device_map": ("infer_auto_device_map",),
    "windlass.compat.checkpoint_loading": ("load_checkpoint_in_model",),
    "windlass.compat.big_model": (
        "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "load_checkpoint_and_dispatch",
    ),
}  # fmt: skip
_MODULES = {
    name: f"windlass.{name}"
    for name in (
        "big_modeling", "data_loader", "hooks", "local_sgd", "logging", "optimizer", "scheduler", "state", "tracking",
        "utils",
    )
}  # fmt: skip
_REFUSED = {"prepare_pippy": "pipelines are not built; shard the model with fsdp_plugin"}
_NAMES = reverse(_HOMES)
_load = loader_of("windlass", _NAMES, _REFUSED)
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    return importlib.import_module(_MODULES[name]) if name in _MODULES else _load(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_MODULES])
