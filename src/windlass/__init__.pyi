__version__: str

from windlass import (
    big_modeling as big_modeling, data_loader as data_loader, hooks as hooks, local_sgd as local_sgd,
    logging as logging, optimizer as optimizer, scheduler as scheduler, state as state, tracking as tracking,
    utils as utils,
)
from windlass.accelerator.accelerator import Accelerator as Accelerator
from windlass.callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
from windlass.callbacks.flow import DefaultFlowCallback as DefaultFlowCallback
from windlass.callbacks.metrics_log import (
    MetricsLogCallback as MetricsLogCallback, read_metrics as read_metrics,
)
from windlass.callbacks.progress import (
    NotebookProgressCallback as NotebookProgressCallback, PrinterCallback as PrinterCallback,
    ProgressCallback as ProgressCallback,
)
from windlass.callbacks.report import ReportCallback as ReportCallback
from windlass.callbacks.weight_averaging import (
    EMACallback as EMACallback, SWACallback as SWACallback,
)
from windlass.checkpoint.weights import (
    load_weights as load_weights, save_weights as save_weights,
)
from windlass.compat.batch_size import find_executable_batch_size as find_executable_batch_size
from windlass.compat.big_models.auto_device_map import infer_auto_device_map as infer_auto_device_map
from windlass.compat.big_models.big_model import (
    cpu_offload as cpu_offload, cpu_offload_with_hook as cpu_offload_with_hook, disk_offload as disk_offload,
    dispatch_model as dispatch_model, init_empty_weights as init_empty_weights,
    init_on_device as init_on_device, load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from windlass.compat.big_models.checkpoint_loading import load_checkpoint_in_model as load_checkpoint_in_model
from windlass.compat.parser import HfArgumentParser as HfArgumentParser
from windlass.compat.pipeline_inference import prepare_pippy as prepare_pippy
from windlass.compat.plugin_engines import DeepSpeedPlugin as DeepSpeedPlugin
from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from windlass.compat.plugins import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs, ParallelismConfig as ParallelismConfig,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from windlass.compat.loaders import synchronize_rng_states as synchronize_rng_states
from windlass.compat.state import PartialState as PartialState
from windlass.compat.trl_parser import TrlParser as TrlParser
from windlass.config.arguments import TrainingArguments as TrainingArguments
from windlass.config.callback_interface import TrainerCallback as TrainerCallback
from windlass.config.enums import (
    DistributedType as DistributedType, EvaluationStrategy as EvaluationStrategy,
    HubStrategy as HubStrategy, IntervalStrategy as IntervalStrategy, OptimizerNames as OptimizerNames,
    ParallelMode as ParallelMode, SaveStrategy as SaveStrategy, SchedulerType as SchedulerType,
)
from windlass.config.loop_options import (
    AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration,
    GradScalerKwargs as GradScalerKwargs, GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs, ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
)
from windlass.core.errors import (
    CheckpointError as CheckpointError, ConfigError as ConfigError, DataError as DataError,
    MemoryShortError as MemoryShortError, MissingDependencyError as MissingDependencyError,
    ModelError as ModelError, NonFiniteError as NonFiniteError, Preempted as Preempted,
    RankMismatchError as RankMismatchError, WindlassError as WindlassError,
)
from windlass.core.events import (
    TrainerControl as TrainerControl, TrainerState as TrainerState,
)
from windlass.core.rng import (
    enable_full_determinism as enable_full_determinism, set_seed as set_seed,
)
from windlass.core.types import (
    EvalLoopOutput as EvalLoopOutput, EvalPrediction as EvalPrediction, LossTerms as LossTerms,
    PredictionOutput as PredictionOutput, TrainOutput as TrainOutput,
)
from windlass.data import (
    DataCollatorForLanguageModeling as DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice as DataCollatorForMultipleChoice,
    DataCollatorForPermutationLanguageModeling as DataCollatorForPermutationLanguageModeling,
    DataCollatorForSeq2Seq as DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification as DataCollatorForTokenClassification,
    DataCollatorWithFlattening as DataCollatorWithFlattening,
    DataCollatorWithPadding as DataCollatorWithPadding, DefaultDataCollator as DefaultDataCollator,
    default_data_collator as default_data_collator,
)
from windlass.data.skip import skip_first_batches as skip_first_batches
from windlass.finetuning.dpo_config import DPOConfig as DPOConfig
from windlass.finetuning.dpo_trainer import DPOTrainer as DPOTrainer
from windlass.finetuning.from_flags import (
    DatasetConfig as DatasetConfig, DatasetMixtureConfig as DatasetMixtureConfig, ModelConfig as ModelConfig,
    ScriptArguments as ScriptArguments, get_dataset as get_dataset,
    get_kbit_device_map as get_kbit_device_map, get_peft_config as get_peft_config,
    get_quantization_config as get_quantization_config,
)
from windlass.finetuning.kto_config import KTOConfig as KTOConfig
from windlass.finetuning.kto_trainer import KTOTrainer as KTOTrainer
from windlass.finetuning.reward_config import RewardConfig as RewardConfig
from windlass.finetuning.reward_trainer import RewardTrainer as RewardTrainer
from windlass.finetuning.seq2seq_arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
from windlass.finetuning.seq2seq_trainer import Seq2SeqTrainer as Seq2SeqTrainer
from windlass.finetuning.sft_config import SFTConfig as SFTConfig
from windlass.finetuning.sft_trainer import SFTTrainer as SFTTrainer
from windlass.finetuning.templates import clone_chat_template as clone_chat_template
from windlass.launchers import (
    debug_launcher as debug_launcher, notebook_launcher as notebook_launcher,
)
from windlass.optim.optimizers.adafactor import Adafactor as Adafactor
from windlass.optim.optimizers.adalomo import AdaLomo as AdaLomo
from windlass.optim.optimizers.apollo_adamw import ApolloAdamW as ApolloAdamW
from windlass.optim.optimizers.galore_adafactor import GaLoreAdafactor as GaLoreAdafactor
from windlass.optim.optimizers.galore_adamw import GaLoreAdamW as GaLoreAdamW
from windlass.optim.optimizers.galore_adamw_8bit import GaLoreAdamW8bit as GaLoreAdamW8bit
from windlass.optim.optimizers.lomo import Lomo as Lomo
from windlass.optim.public import (
    get_constant_schedule as get_constant_schedule,
    get_constant_schedule_with_warmup as get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup as get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup as get_cosine_with_min_lr_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup_lr_rate as get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    get_greedy_schedule as get_greedy_schedule, get_inverse_sqrt_schedule as get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup as get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup as get_polynomial_decay_schedule_with_warmup,
    get_reduce_on_plateau_schedule as get_reduce_on_plateau_schedule, get_scheduler as get_scheduler,
    get_wsd_schedule as get_wsd_schedule,
)
from windlass.optim.schedules.greedy import GreedyLR as GreedyLR
from windlass.text.conversations import (
    apply_chat_template as apply_chat_template, extract_prompt as extract_prompt,
    get_training_chat_template as get_training_chat_template, is_conversational as is_conversational,
    is_conversational_from_value as is_conversational_from_value,
    maybe_apply_chat_template as maybe_apply_chat_template,
    maybe_convert_to_chatml as maybe_convert_to_chatml, maybe_extract_prompt as maybe_extract_prompt,
    maybe_unpair_preference_dataset as maybe_unpair_preference_dataset,
    supports_tool_calling as supports_tool_calling, unpair_preference_dataset as unpair_preference_dataset,
)
from windlass.text.image_messages import prepare_multimodal_messages as prepare_multimodal_messages
from windlass.text.mixture import DatasetMixture as DatasetMixture
from windlass.text.packing import pack_dataset as pack_dataset
from windlass.text.prepare_text import (
    PreparedText as PreparedText, prepare_text as prepare_text,
)
from windlass.text.text_options import TextOptions as TextOptions
from windlass.trainer.trainer import Trainer as Trainer
from windlass.utils.imports import is_rich_available as is_rich_available
