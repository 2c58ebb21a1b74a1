from windlass.callbacks.progress import ProgressCallback as ProgressCallback
from windlass.compat.script_helpers import is_fsdp_managed_module as is_fsdp_managed_module
from windlass.search.default_spaces import (
    BestRun as BestRun, hp_params as hp_params,
)
from windlass.compat.tracker_callbacks import (
    ClearMLCallback as ClearMLCallback, CometCallback as CometCallback, DVCLiveCallback as DVCLiveCallback,
    INTEGRATION_TO_CALLBACK as INTEGRATION_TO_CALLBACK, MLflowCallback as MLflowCallback,
    SwanLabCallback as SwanLabCallback, TensorBoardCallback as TensorBoardCallback,
    TrackioCallback as TrackioCallback, WandbCallback as WandbCallback, default_logdir as default_logdir,
    get_available_reporting_integrations as get_available_reporting_integrations,
    get_reporting_integration_callbacks as get_reporting_integration_callbacks,
    rewrite_logs as rewrite_logs,
)
from windlass.config.arguments import TrainingArguments as TrainingArguments
from windlass.config.callback_interface import TrainerCallback as TrainerCallback
from windlass.config.enums import (
    IntervalStrategy as IntervalStrategy, ParallelMode as ParallelMode,
)
from windlass.utils.imports import (
    is_azureml_available as is_azureml_available, is_clearml_available as is_clearml_available,
    is_codecarbon_available as is_codecarbon_available, is_comet_available as is_comet_available,
    is_dagshub_available as is_dagshub_available, is_deepspeed_available as is_deepspeed_available,
    is_dvclive_available as is_dvclive_available,
    is_flyte_deck_standard_available as is_flyte_deck_standard_available,
    is_flytekit_available as is_flytekit_available, is_kubeflow_available as is_kubeflow_available,
    is_mlflow_available as is_mlflow_available, is_neptune_available as is_neptune_available,
    is_optuna_available as is_optuna_available, is_ray_available as is_ray_available,
    is_ray_tune_available as is_ray_tune_available, is_swanlab_available as is_swanlab_available,
    is_tensorboard_available as is_tensorboard_available, is_trackio_available as is_trackio_available,
    is_wandb_available as is_wandb_available,
)
from windlass.zero.building import (
    HfDeepSpeedConfig as HfDeepSpeedConfig, is_deepspeed_zero3_enabled as is_deepspeed_zero3_enabled,
)
