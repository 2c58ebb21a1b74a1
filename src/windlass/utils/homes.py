"""Where each name of `windlass.utils` lives, and why some names that scripts know are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from windlass.core.lazy import loader_of, reverse

HOMES: dict[str, tuple[str, ...]] = {
    "windlass.config.plugins": (
        "AORecipeKwargs", "AutocastKwargs", "BnbQuantizationConfig", "DataLoaderConfiguration", "DeepSpeedPlugin",
        "DeepSpeedSequenceParallelConfig", "DistributedDataParallelKwargs", "FP8RecipeKwargs",
        "FullyShardedDataParallelPlugin", "GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs",
        "KwargsHandler", "MSAMPRecipeKwargs", "MegatronLMPlugin", "ParallelismConfig", "ProfileKwargs",
        "ProjectConfiguration", "TERecipeKwargs", "TorchContextParallelConfig", "TorchDynamoPlugin",
        "TorchTensorParallelConfig", "TorchTensorParallelPlugin",
    ),
    "windlass.config.plugin_words": (
        "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType", "DynamoBackend",
        "FP8BackendType", "LoggerType", "PrecisionType", "RNGType", "SageMakerDistributedType",
    ),
    "windlass.core.trees": (
        "TensorInformation", "concatenate", "convert_to_fp32", "find_batch_size", "find_device", "get_data_structure",
        "get_shape", "honor_type", "ignorant_find_batch_size", "initialize_tensors", "is_namedtuple",
        "is_tensor_information", "is_torch_tensor", "listify", "pad_input_tensors", "recursively_apply",
        "send_to_device", "slice_tensors",
    ),
    "windlass.dist.operations": (
        "CannotPadNestedTensorWarning", "DistributedOperationException", "broadcast", "broadcast_object_list",
        "copy_tensor_to_devices", "gather", "gather_object", "pad_across_processes", "reduce",
    ),
    "windlass.accelerator.device_cache": (
        "clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size",
    ),
    "windlass.accelerator.unwrapping": ("extract_model_from_parallel", "is_compiled_module"),
    "windlass.accelerator.shared_rng": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
    "windlass.utils.progress_bar": ("tqdm",),
    "windlass.utils.versions": ("compare_versions", "is_torch_version"),
    "windlass.utils.environment": (
        "are_libraries_initialized", "clear_environment", "get_current_device_type", "get_int_from_env",
        "parse_choice_from_env", "parse_flag_from_env", "patch_environment", "purge_accelerate_environment",
        "str_to_bool",
    ),
    "windlass.utils.imports": (
        "is_aim_available", "is_amdsmi_available", "is_bf16_available", "is_bnb_available", "is_boto3_available",
        "is_clearml_available", "is_comet_ml_available", "is_cuda_available", "is_datasets_available",
        "is_deepspeed_available", "is_dvclive_available", "is_fp16_available", "is_fp8_available",
        "is_hpu_available", "is_import_timer_available", "is_lomo_available", "is_matplotlib_available",
        "is_megatron_lm_available", "is_mlflow_available", "is_mlu_available", "is_mps_available",
        "is_msamp_available", "is_musa_available", "is_neuron_available", "is_npu_available", "is_pandas_available",
        "is_peft_available", "is_pynvml_available", "is_pytest_available", "is_rich_available", "is_rocm_available",
        "is_sagemaker_available", "is_schedulefree_available", "is_sdaa_available", "is_swanlab_available",
        "is_tensorboard_available", "is_timm_available", "is_torch_xla_available", "is_torchao_available",
        "is_torchdata_available", "is_torchdata_stateful_dataloader_available", "is_torchvision_available",
        "is_tqdm_available", "is_trackio_available", "is_transformer_engine_available", "is_transformers_available",
        "is_triton_available", "is_wandb_available", "is_weights_only_available", "is_xccl_available",
        "is_xpu_available",
    ),
    "windlass.utils.other": (
        "clean_state_dict_for_safetensors", "convert_bytes", "convert_outputs_to_fp32",
        "get_module_children_bottom_up", "get_pretty_name", "is_port_in_use", "load",
        "merge_dicts", "model_has_dtensor", "recursive_getattr", "save", "wait_for_everyone", "write_basic_config",
    ),
    "windlass.utils.constants": (
        "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME",
    ),
    "windlass.compat.attach_hooks": ("PrefixedDataset", "extract_submodules_state_dict"),
    "windlass.compat.auto_device_map": ("infer_auto_device_map",),
    "windlass.compat.device_map": ("check_device_map", "check_tied_parameters_on_same_device"),
    "windlass.compat.device_memory": ("get_balanced_memory", "get_max_memory"),
    "windlass.transforms.module_sizes": (
        "calculate_maximum_sizes", "compute_module_sizes", "convert_file_size_to_int", "dtype_byte_size",
        "get_max_layer_size",
    ),
    "windlass.transforms.module_tensors": (
        "named_module_tensors", "set_module_tensor_to_device",
    ),
    "windlass.compat.moving": ("align_module_device",),
    "windlass.compat.ties": ("find_tied_parameters", "retie_parameters"),
    "windlass.transforms.offload": ("has_offloaded_params",),
    "windlass.compat.checkpoint_loading": ("load_checkpoint_in_model",),
    "windlass.compat.offloaded": (
        "OffloadedWeightsLoader", "offload_state_dict", "offload_weight", "save_offload_index",
    ),
}  # fmt: skip


def names_of(module: str, *homes: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a module that has the names of some homes."""
    names = reverse({home: HOMES[home] for home in homes})
    return loader_of(module, names), sorted(names)


_DEEPSPEED = "DeepSpeed is not built"
_MEGATRON = "Megatron-LM is not built"
_EIGHT_BIT = "training and loading in eight or four bits is not built"
_PICKLE = "it names a file of pickled tensors, which are neither written nor read"
_LAUNCHER = "`windlass launch` starts processes by itself"
_SHARDING = "sharded models are prepared, saved and loaded by Accelerator"
_OWN_NAMES = "checkpoints have a layout of their own; save_state and load_state know it"
_OFFLOADED = "weights are offloaded into safetensors files, which OffloadedWeightsLoader reads"
_INSIDE = "it is a detail of how that library works inside"

REFUSED: dict[str, tuple[str, ...]] = {
    _DEEPSPEED: (
        "GatheredParameters", "compile_regions_deepspeed", "deepspeed_required", "prepare_deepspeed_cmd_env",
        "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "DummyOptim",
        "DummyScheduler", "HfDeepSpeedConfig", "get_active_deepspeed_plugin", "map_pytorch_optim_to_deepspeed",
    ),
    _MEGATRON: (
        "AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "MegatronLMDummyDataLoader", "MegatronLMDummyScheduler",
        "T5TrainStep", "add_model_config_to_megatron_parser", "avg_losses_across_data_parallel_group",
    ),
    _EIGHT_BIT: (
        "apply_fp8_autowrap", "check_cuda_fp8_capability", "contextual_fp8_autocast", "convert_model",
        "convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "has_4bit_bnb_layers", "has_ao_layers",
        "has_transformer_engine_layers", "is_4bit_bnb_available", "is_8bit_bnb_available",
        "is_bitsandbytes_multi_backend_available", "is_transformer_engine_mxfp8_available", "load_and_quantize_model",
        "torchao_required",
    ),
    _PICKLE: ("MODEL_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME"),
    _LAUNCHER: (
        "PrepareForLaunch", "TORCH_LAUNCH_PARAMS", "convert_dict_to_env_variables", "prepare_multi_gpu_env",
        "prepare_sagemager_args_inputs", "prepare_simple_launcher_cmd_env", "prepare_tpu",
        "get_cpu_distributed_information", "set_numa_affinity", "check_cuda_p2p_ib_support", "get_gpu_info",
        "check_os_kernel",
    ),
    _SHARDING: (
        "disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading", "ensure_weights_retied",
        "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict", "fsdp2_prepare_model",
        "fsdp2_switch_optimizer_parameters", "get_fsdp2_grad_scaler", "load_fsdp_model", "load_fsdp_optimizer",
        "merge_fsdp_weights", "save_fsdp_model", "save_fsdp_optimizer", "compile_regions_fsdp2",
    ),
    _OWN_NAMES: (
        "OPTIMIZER_NAME", "PROFILE_PATTERN_NAME", "RNG_STATE_NAME", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME",
    ),
    _OFFLOADED: ("load_offloaded_weight", "load_offloaded_weights"),
    _INSIDE: (
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "TORCH_DISTRIBUTED_OPERATION_TYPES",
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION", "check_tied_parameters_in_config", "compile_regions",
        "get_grad_scaler", "get_mixed_precision_context_manager", "get_model_tp_size", "has_compiled_regions",
        "id_tensor_storage", "install_xla", "is_habana_gaudi1", "is_peft_model", "is_pippy_available",
        "load_state_dict",
    ),
}  # fmt: skip
