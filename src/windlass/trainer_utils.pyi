from windlass.compat.checkpoint_folders import (
    PREFIX_CHECKPOINT_DIR as PREFIX_CHECKPOINT_DIR,
    compare_trainer_and_checkpoint_args as compare_trainer_and_checkpoint_args,
    get_last_checkpoint as get_last_checkpoint, rotate_checkpoints as rotate_checkpoints,
    sort_checkpoints as sort_checkpoints,
)
from windlass.compat.fitting_batch import find_executable_batch_size as find_executable_batch_size
from windlass.trainer.memory_stages import TrainerMemoryTracker as TrainerMemoryTracker
from windlass.compat.model_queries import (
    align_special_tokens as align_special_tokens, check_target_module_exists as check_target_module_exists,
    is_peft_model as is_peft_model, unwrap_peft_model as unwrap_peft_model,
    validate_quantization_for_training as validate_quantization_for_training,
)
from windlass.compat.script_helpers import (
    FSDPOption as FSDPOption, RemoveColumnsCollator as RemoveColumnsCollator, has_length as has_length,
    is_main_process as is_main_process, number_of_arguments as number_of_arguments,
    seed_worker as seed_worker, suppress_progress_bars as suppress_progress_bars,
    total_processes_number as total_processes_number,
)
from windlass.search.default_spaces import (
    BestRun as BestRun, HPSearchBackend as HPSearchBackend,
    default_compute_objective as default_compute_objective,
    default_hp_space_optuna as default_hp_space_optuna, default_hp_space_ray as default_hp_space_ray,
    default_hp_space_wandb as default_hp_space_wandb,
)
from windlass.compat.split_weights import load_sharded_checkpoint as load_sharded_checkpoint
from windlass.compat.tensor_nests import denumpify_detensorize as denumpify_detensorize
from windlass.config.enums import (
    EvaluationStrategy as EvaluationStrategy, HubStrategy as HubStrategy,
    IntervalStrategy as IntervalStrategy, SaveStrategy as SaveStrategy, SchedulerType as SchedulerType,
)
from windlass.core.rng import (
    enable_full_determinism as enable_full_determinism, set_seed as set_seed,
)
from windlass.core.types import (
    EvalLoopOutput as EvalLoopOutput, EvalPrediction as EvalPrediction,
    PredictionOutput as PredictionOutput, TrainOutput as TrainOutput,
)
from windlass.metrics.speed import speed_metrics as speed_metrics
from windlass.utils.constants import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
