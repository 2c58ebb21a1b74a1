"""The module of each name of `windlass.utils`. Why some that scripts know are not there: `config/support_names.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse
from windlass.utils.imports import NAMES

HOMES: dict[str, tuple[str, ...]] = {
    "windlass.config.plugins": (
        "AORecipeKwargs", "AutocastKwargs", "DataLoaderConfiguration", "DistributedDataParallelKwargs",
        "GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs", "ProfileKwargs",
        "ProjectConfiguration", "TorchDynamoPlugin",
    ),
    "windlass.config.plugin_base": ("KwargsHandler",),
    "windlass.config.plugin_engines": (
        "BnbQuantizationConfig", "DeepSpeedPlugin", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "MegatronLMPlugin",
        "TERecipeKwargs",
    ),
    "windlass.config.plugin_fsdp": ("FullyShardedDataParallelPlugin",),
    "windlass.config.plugin_parallelism": (
        "DeepSpeedSequenceParallelConfig", "ParallelismConfig", "TorchContextParallelConfig",
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
    "windlass.accelerator.zero_engines": ("DummyOptim", "DummyScheduler"),
    "windlass.accelerator.device_cache": ("clear_device_cache", "should_reduce_batch_size"),
    "windlass.zero.building": ("HfDeepSpeedConfig",),
    "windlass.compat.batch_size": ("find_executable_batch_size", "release_memory"),
    "windlass.accelerator.forward": ("extract_model_from_parallel", "is_compiled_module"),
    "windlass.compat.seeds": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
    "windlass.utils.progress_bar": ("tqdm",),
    "windlass.utils.versions": ("compare_versions", "is_torch_version"),
    "windlass.utils.environment": (
        "are_libraries_initialized", "clear_environment", "get_current_device_type", "get_int_from_env",
        "parse_choice_from_env", "parse_flag_from_env", "patch_environment", "purge_accelerate_environment",
        "str_to_bool",
    ),
    "windlass.utils.imports": NAMES,
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
    "windlass.compat.module_sizes": (
        "calculate_maximum_sizes", "compute_module_sizes", "dtype_byte_size", "get_max_layer_size",
    ),
    "windlass.config.quantities": ("convert_file_size_to_int",),
    "windlass.compat.module_tensors": (
        "find_tied_parameters", "get_non_persistent_buffers", "named_module_tensors", "retie_parameters",
        "set_module_tensor_to_device",
    ),
    "windlass.compat.compiled_regions": ("compile_regions", "has_compiled_regions"),
    "windlass.compat.model_queries": ("is_peft_model",),
    "windlass.compat.moving": ("align_module_device",),
    "windlass.accelerator.offloaded_weights": ("has_offloaded_params",),
    "windlass.compat.checkpoint_loading": ("load_checkpoint_in_model", "load_state_dict"),
    "windlass.compat.offloaded": (
        "OffloadedWeightsLoader", "offload_state_dict", "offload_weight", "save_offload_index",
    ),
}  # fmt: skip


def names_of(module: str, *homes: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of a module that re-exports the names of some homes."""
    names = reverse({home: HOMES[home] for home in homes})
    return loader_of(module, names, WHY), sorted(names)
