"""Names that scripts import from here: trackers and other packages, loaded when they are first asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.callbacks.progress": ("ProgressCallback",),
    "windlass.compat.script_helpers": ("is_fsdp_managed_module",),
    "windlass.compat.search_space": ("BestRun", "hp_params"),
    "windlass.compat.tracker_callbacks": (
        "ClearMLCallback", "CometCallback", "DVCLiveCallback", "INTEGRATION_TO_CALLBACK", "MLflowCallback",
        "SwanLabCallback", "TensorBoardCallback", "TrackioCallback", "WandbCallback", "default_logdir",
        "get_available_reporting_integrations", "get_reporting_integration_callbacks", "rewrite_logs",
    ),
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.config.enums": ("IntervalStrategy", "ParallelMode"),
    "windlass.core.events": ("TrainerCallback",),
    "windlass.zero.building": ("HfDeepSpeedConfig", "is_deepspeed_zero3_enabled"),
    "windlass.utils.imports": (
        "is_azureml_available", "is_clearml_available", "is_codecarbon_available", "is_comet_available",
        "is_dagshub_available", "is_deepspeed_available", "is_dvclive_available", "is_flyte_deck_standard_available",
        "is_flytekit_available", "is_kubeflow_available", "is_mlflow_available", "is_neptune_available",
        "is_optuna_available", "is_ray_available", "is_ray_tune_available", "is_swanlab_available",
        "is_tensorboard_available", "is_trackio_available", "is_wandb_available",
    ),
})  # fmt: skip
