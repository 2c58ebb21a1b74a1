from windlass.compat.checkpoint_folders import remove_dummy_checkpoint as remove_dummy_checkpoint
from windlass.compat.length_grouping import (
    DistributedLengthGroupedSampler as DistributedLengthGroupedSampler,
    LengthGroupedSampler as LengthGroupedSampler, get_length_grouped_indices as get_length_grouped_indices,
)
from windlass.compat.metric_reports import (
    get_learning_rates as get_learning_rates, get_num_trainable_parameters as get_num_trainable_parameters,
    get_optimizer_group as get_optimizer_group, log_metrics as log_metrics,
    metrics_format as metrics_format, save_metrics as save_metrics, save_state as save_state,
)
from windlass.compat.model_queries import (
    get_model_param_count as get_model_param_count,
    get_module_class_from_name as get_module_class_from_name, get_parameter_names as get_parameter_names,
    is_attention_mask_causal as is_attention_mask_causal,
)
from windlass.compat.loaders import (
    BatchRebalanceSampler as BatchRebalanceSampler,
    DistributedSamplerWithLoop as DistributedSamplerWithLoop, IterableDatasetShard as IterableDatasetShard,
    ShardSampler as ShardSampler, get_dataloader_sampler as get_dataloader_sampler,
)
from windlass.compat.script_helpers import (
    reissue_pt_warnings as reissue_pt_warnings, set_rng_state_for_device as set_rng_state_for_device,
    torch_distributed_zero_first as torch_distributed_zero_first,
)
from windlass.compat.tensor_nests import (
    EvalLoopContainer as EvalLoopContainer, atleast_1d as atleast_1d,
    distributed_broadcast_scalars as distributed_broadcast_scalars,
    distributed_concat as distributed_concat, expand_like as expand_like,
    find_batch_size as find_batch_size, nested_concat as nested_concat, nested_detach as nested_detach,
    nested_gather as nested_gather, nested_new_like as nested_new_like, nested_numpify as nested_numpify,
    nested_truncate as nested_truncate, numpy_pad_and_concatenate as numpy_pad_and_concatenate,
    torch_pad_and_concatenate as torch_pad_and_concatenate,
)
from windlass.config.accelerator_config import AcceleratorConfig as AcceleratorConfig
from windlass.trainer.losses import LabelSmoother as LabelSmoother
