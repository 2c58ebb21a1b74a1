"""`Trainer`, and the names that scripts import beside it; they are loaded when they are first asked for."""

from windlass.config.support_names import lazy_names

# Strings: what lies on higher floors is not imported by this room.
__getattr__, __all__ = lazy_names(__name__, {
    "windlass.trainer.trainer": ("Trainer",),
    "windlass.accelerator.accelerator": ("Accelerator",),
    "windlass.compat.state": ("AcceleratorState",),
    "windlass.callbacks.flow": ("DefaultFlowCallback",),
    "windlass.callbacks.handler": ("CallbackHandler",),
    "windlass.callbacks.printer": ("PrinterCallback",),
    "windlass.callbacks.progress": ("ProgressCallback",),
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.config.enums": ("HubStrategy", "OptimizerNames", "ParallelMode", "SaveStrategy"),
    "windlass.core.events": ("ExportableState", "TrainerCallback", "TrainerControl", "TrainerState"),
    "windlass.core.rng": ("enable_full_determinism", "set_seed"),
    "windlass.core.types": ("EvalLoopOutput", "EvalPrediction", "PredictionOutput", "TrainOutput"),
    "windlass.data": ("DataCollatorWithPadding", "default_data_collator"),
    "windlass.data.skip": ("skip_first_batches",),
    "windlass.optim.public": ("get_scheduler",),
    "windlass.optim.schedules.greedy": ("GreedyLR",),
    "windlass.compat.checkpoint_folders": (
        "PREFIX_CHECKPOINT_DIR", "TRAINER_STATE_NAME", "compare_trainer_and_checkpoint_args", "get_last_checkpoint",
        "remove_dummy_checkpoint", "rotate_checkpoints", "sort_checkpoints",
    ),
    "windlass.compat.fitting_batch": ("find_executable_batch_size",),
    "windlass.trainer.losses": ("LabelSmoother",),
    "windlass.compat.length_grouping": ("LengthGroupedSampler",),
    "windlass.compat.memory_stages": ("TrainerMemoryTracker",),
    "windlass.metrics.speed": ("speed_metrics",),
    "windlass.compat.model_queries": (
        "align_special_tokens", "get_model_param_count", "get_parameter_names", "has_mixed_dtensor",
        "is_attention_mask_causal", "is_optimizer_factory", "unwrap_peft_model", "validate_quantization_for_training",
    ),
    "windlass.compat.rank_samplers": ("BatchRebalanceSampler", "IterableDatasetShard"),
    "windlass.compat.script_helpers": (
        "DEFAULT_CALLBACKS", "DEFAULT_PROGRESS_CALLBACK", "RemoveColumnsCollator", "has_length", "number_of_arguments",
        "reissue_pt_warnings", "seed_worker", "set_rng_state_for_device", "suppress_progress_bars",
    ),
    "windlass.compat.search_space": ("BestRun", "HPSearchBackend", "default_compute_objective"),
    "windlass.compat.split_weights": ("load_sharded_checkpoint",),
    "windlass.compat.tensor_nests": (
        "EvalLoopContainer", "denumpify_detensorize", "distributed_broadcast_scalars", "find_batch_size",
        "nested_detach", "nested_gather",
    ),
    "windlass.compat.tracker_callbacks": ("get_reporting_integration_callbacks",),
})  # fmt: skip
