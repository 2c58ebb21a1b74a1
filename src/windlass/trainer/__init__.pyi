from windlass.accelerator.accelerator import Accelerator as Accelerator
from windlass.callbacks.flow import DefaultFlowCallback as DefaultFlowCallback
from windlass.callbacks.handler import CallbackHandler as CallbackHandler
from windlass.callbacks.progress import PrinterCallback as PrinterCallback
from windlass.callbacks.progress import ProgressCallback as ProgressCallback
from windlass.compat.checkpoint_folders import (
    PREFIX_CHECKPOINT_DIR as PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME as TRAINER_STATE_NAME,
    compare_trainer_and_checkpoint_args as compare_trainer_and_checkpoint_args,
    get_last_checkpoint as get_last_checkpoint, remove_dummy_checkpoint as remove_dummy_checkpoint,
    rotate_checkpoints as rotate_checkpoints, sort_checkpoints as sort_checkpoints,
)
from windlass.compat.fitting_batch import find_executable_batch_size as find_executable_batch_size
from windlass.compat.length_grouping import LengthGroupedSampler as LengthGroupedSampler
from windlass.compat.memory_stages import TrainerMemoryTracker as TrainerMemoryTracker
from windlass.compat.model_queries import (
    align_special_tokens as align_special_tokens, get_model_param_count as get_model_param_count,
    get_parameter_names as get_parameter_names, has_mixed_dtensor as has_mixed_dtensor,
    is_attention_mask_causal as is_attention_mask_causal, is_optimizer_factory as is_optimizer_factory,
    unwrap_peft_model as unwrap_peft_model,
    validate_quantization_for_training as validate_quantization_for_training,
)
from windlass.compat.loaders import (
    BatchRebalanceSampler as BatchRebalanceSampler, IterableDatasetShard as IterableDatasetShard,
)
from windlass.compat.script_helpers import (
    DEFAULT_CALLBACKS as DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK as DEFAULT_PROGRESS_CALLBACK,
    RemoveColumnsCollator as RemoveColumnsCollator, has_length as has_length,
    number_of_arguments as number_of_arguments, reissue_pt_warnings as reissue_pt_warnings,
    seed_worker as seed_worker, set_rng_state_for_device as set_rng_state_for_device,
    suppress_progress_bars as suppress_progress_bars,
)
from windlass.search.default_spaces import (
    BestRun as BestRun, HPSearchBackend as HPSearchBackend,
    default_compute_objective as default_compute_objective,
)
from windlass.compat.split_weights import load_sharded_checkpoint as load_sharded_checkpoint
from windlass.compat.state import AcceleratorState as AcceleratorState
from windlass.compat.tensor_nests import (
    EvalLoopContainer as EvalLoopContainer, denumpify_detensorize as denumpify_detensorize,
    distributed_broadcast_scalars as distributed_broadcast_scalars, find_batch_size as find_batch_size,
    nested_detach as nested_detach, nested_gather as nested_gather,
)
from windlass.compat.tracker_callbacks import get_reporting_integration_callbacks as get_reporting_integration_callbacks
from windlass.config.arguments import TrainingArguments as TrainingArguments
from windlass.config.callback_interface import TrainerCallback as TrainerCallback
from windlass.config.enums import (
    HubStrategy as HubStrategy, OptimizerNames as OptimizerNames, ParallelMode as ParallelMode,
    SaveStrategy as SaveStrategy,
)
from windlass.core.events import (
    ExportableState as ExportableState, TrainerControl as TrainerControl, TrainerState as TrainerState,
)
from windlass.core.rng import (
    enable_full_determinism as enable_full_determinism, set_seed as set_seed,
)
from windlass.core.types import (
    EvalLoopOutput as EvalLoopOutput, EvalPrediction as EvalPrediction,
    PredictionOutput as PredictionOutput, TrainOutput as TrainOutput,
)
from windlass.data import (
    DataCollatorWithPadding as DataCollatorWithPadding, default_data_collator as default_data_collator,
)
from windlass.data.skip import skip_first_batches as skip_first_batches
from windlass.metrics.speed import speed_metrics as speed_metrics
from windlass.optim.public import get_scheduler as get_scheduler
from windlass.optim.schedules.greedy import GreedyLR as GreedyLR
from windlass.trainer.losses import LabelSmoother as LabelSmoother
from windlass.trainer.trainer import Trainer as Trainer
