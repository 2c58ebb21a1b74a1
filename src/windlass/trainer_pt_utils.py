"""Names that scripts import from here: tensors, samplers and reports of a Trainer, loaded when they are asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.compat.checkpoint_folders": ("remove_dummy_checkpoint",),
    "windlass.trainer.losses": ("LabelSmoother",),
    "windlass.compat.length_grouping": (
        "DistributedLengthGroupedSampler", "LengthGroupedSampler", "get_length_grouped_indices",
    ),
    "windlass.compat.metric_reports": (
        "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group", "log_metrics", "metrics_format",
        "save_metrics", "save_state",
    ),
    "windlass.compat.model_queries": (
        "get_model_param_count", "get_module_class_from_name", "get_parameter_names", "is_attention_mask_causal",
    ),
    "windlass.compat.rank_samplers": (
        "BatchRebalanceSampler", "DistributedSamplerWithLoop", "IterableDatasetShard", "ShardSampler",
        "get_dataloader_sampler",
    ),
    "windlass.compat.script_helpers": (
        "reissue_pt_warnings", "set_rng_state_for_device", "torch_distributed_zero_first",
    ),
    "windlass.compat.tensor_nests": (
        "EvalLoopContainer", "atleast_1d", "distributed_broadcast_scalars", "distributed_concat", "expand_like",
        "find_batch_size", "nested_concat", "nested_detach", "nested_gather", "nested_new_like", "nested_numpify",
        "nested_truncate", "numpy_pad_and_concatenate", "torch_pad_and_concatenate",
    ),
    "windlass.config.accelerator_config": ("AcceleratorConfig",),
})  # fmt: skip
