"""Names that scripts import from here: helpers around a Trainer, loaded when they are first asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.compat.checkpoint_folders": (
        "PREFIX_CHECKPOINT_DIR", "compare_trainer_and_checkpoint_args", "get_last_checkpoint", "rotate_checkpoints",
        "sort_checkpoints",
    ),
    "windlass.compat.fitting_batch": ("find_executable_batch_size",),
    "windlass.compat.memory_stages": ("TrainerMemoryTracker",),
    "windlass.metrics.speed": ("speed_metrics",),
    "windlass.compat.model_queries": (
        "align_special_tokens", "check_target_module_exists", "is_peft_model", "unwrap_peft_model",
        "validate_quantization_for_training",
    ),
    "windlass.compat.script_helpers": (
        "FSDPOption", "RemoveColumnsCollator", "has_length", "is_main_process", "number_of_arguments", "seed_worker",
        "suppress_progress_bars", "total_processes_number",
    ),
    "windlass.compat.search_space": (
        "BestRun", "HPSearchBackend", "default_compute_objective", "default_hp_space_optuna", "default_hp_space_ray",
        "default_hp_space_wandb",
    ),
    "windlass.compat.split_weights": ("load_sharded_checkpoint",),
    "windlass.compat.tensor_nests": ("denumpify_detensorize",),
    "windlass.config.enums": (
        "EvaluationStrategy", "HubStrategy", "IntervalStrategy", "SaveStrategy", "SchedulerType",
    ),
    "windlass.core.rng": ("enable_full_determinism", "set_seed"),
    "windlass.core.types": ("EvalLoopOutput", "EvalPrediction", "PredictionOutput", "TrainOutput"),
    "windlass.utils.constants": ("SAFE_WEIGHTS_INDEX_NAME",),
})  # fmt: skip
