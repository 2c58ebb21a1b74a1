import windlass.core.logs as _logs

logging = _logs

from windlass.accelerator.device_cache import (
    clear_device_cache as clear_device_cache, should_reduce_batch_size as should_reduce_batch_size,
)
from windlass.accelerator.forward import (
    extract_model_from_parallel as extract_model_from_parallel, is_compiled_module as is_compiled_module,
)
from windlass.accelerator.offloaded_weights import has_offloaded_params as has_offloaded_params
from windlass.accelerator.zero_engines import (
    DummyOptim as DummyOptim, DummyScheduler as DummyScheduler,
)
from windlass.compat.batch_size import (
    find_executable_batch_size as find_executable_batch_size, release_memory as release_memory,
)
from windlass.compat.big_models.attach_hooks import (
    PrefixedDataset as PrefixedDataset, extract_submodules_state_dict as extract_submodules_state_dict,
)
from windlass.compat.big_models.auto_device_map import infer_auto_device_map as infer_auto_device_map
from windlass.compat.big_models.checkpoint_loading import (
    load_checkpoint_in_model as load_checkpoint_in_model, load_state_dict as load_state_dict,
)
from windlass.compat.big_models.auto_device_map import (
    check_device_map as check_device_map,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from windlass.compat.big_models.device_memory import (
    get_balanced_memory as get_balanced_memory, get_max_memory as get_max_memory,
)
from windlass.compat.big_models.device_memory import (
    calculate_maximum_sizes as calculate_maximum_sizes, compute_module_sizes as compute_module_sizes,
    dtype_byte_size as dtype_byte_size, get_max_layer_size as get_max_layer_size,
)
from windlass.compat.big_models.module_tensors import (
    find_tied_parameters as find_tied_parameters, get_non_persistent_buffers as get_non_persistent_buffers,
    named_module_tensors as named_module_tensors, retie_parameters as retie_parameters,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from windlass.compat.big_models.module_tensors import align_module_device as align_module_device
from windlass.compat.big_models.offloaded import (
    OffloadedWeightsLoader as OffloadedWeightsLoader, offload_state_dict as offload_state_dict,
    offload_weight as offload_weight, save_offload_index as save_offload_index,
)
from windlass.compat.compiled_regions import (
    compile_regions as compile_regions, has_compiled_regions as has_compiled_regions,
)
from windlass.compat.model_queries import is_peft_model as is_peft_model
from windlass.compat.plugin_engines import (
    BnbQuantizationConfig as BnbQuantizationConfig, DeepSpeedPlugin as DeepSpeedPlugin,
    FP8RecipeKwargs as FP8RecipeKwargs, MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    MegatronLMPlugin as MegatronLMPlugin, TERecipeKwargs as TERecipeKwargs,
)
from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from windlass.compat.plugins import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    ParallelismConfig as ParallelismConfig, PipelineParallelConfig as PipelineParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from windlass.compat.plugins import (
    ComputeEnvironment as ComputeEnvironment, CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType, DynamoBackend as DynamoBackend,
    PrecisionType as PrecisionType, SageMakerDistributedType as SageMakerDistributedType,
)
from windlass.compat.plugins import (
    AORecipeKwargs as AORecipeKwargs, DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from windlass.compat.loaders import (
    set_seed as set_seed, synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from windlass.config.enums import (
    DistributedType as DistributedType, FP8BackendType as FP8BackendType, LoggerType as LoggerType,
    RNGType as RNGType,
)
from windlass.config.loop_options import (
    AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration,
    GradScalerKwargs as GradScalerKwargs, GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs, ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
)
from windlass.config.loop_options import KwargsHandler as KwargsHandler
from windlass.config.kinds import convert_file_size_to_int as convert_file_size_to_int
from windlass.core.trees import (
    TensorInformation as TensorInformation, concatenate as concatenate, convert_to_fp32 as convert_to_fp32,
    find_batch_size as find_batch_size, find_device as find_device,
    get_data_structure as get_data_structure, get_shape as get_shape, honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size, initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple, is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor, listify as listify, pad_input_tensors as pad_input_tensors,
    recursively_apply as recursively_apply, send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from windlass.dist.operations import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    DistributedOperationException as DistributedOperationException, broadcast as broadcast,
    broadcast_object_list as broadcast_object_list, copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather, gather_object as gather_object, pad_across_processes as pad_across_processes,
    reduce as reduce,
)
from windlass.utils.constants import (
    SAFE_MODEL_NAME as SAFE_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
)
from windlass.utils.environment import (
    are_libraries_initialized as are_libraries_initialized, clear_environment as clear_environment,
    get_current_device_type as get_current_device_type, get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env, parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment, purge_accelerate_environment as purge_accelerate_environment,
    str_to_bool as str_to_bool,
)
from windlass.utils.imports import (
    is_4bit_bnb_available as is_4bit_bnb_available, is_8bit_bnb_available as is_8bit_bnb_available,
    is_aim_available as is_aim_available, is_amdsmi_available as is_amdsmi_available,
    is_azureml_available as is_azureml_available, is_bf16_available as is_bf16_available,
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    is_bnb_available as is_bnb_available, is_boto3_available as is_boto3_available,
    is_clearml_available as is_clearml_available, is_codecarbon_available as is_codecarbon_available,
    is_comet_available as is_comet_available, is_comet_ml_available as is_comet_ml_available,
    is_cuda_available as is_cuda_available, is_dagshub_available as is_dagshub_available,
    is_datasets_available as is_datasets_available, is_deepspeed_available as is_deepspeed_available,
    is_dvclive_available as is_dvclive_available,
    is_flyte_deck_standard_available as is_flyte_deck_standard_available,
    is_flytekit_available as is_flytekit_available, is_fp16_available as is_fp16_available,
    is_fp8_available as is_fp8_available, is_habana_gaudi1 as is_habana_gaudi1,
    is_hpu_available as is_hpu_available, is_import_timer_available as is_import_timer_available,
    is_kubeflow_available as is_kubeflow_available, is_lomo_available as is_lomo_available,
    is_matplotlib_available as is_matplotlib_available,
    is_megatron_lm_available as is_megatron_lm_available, is_mlflow_available as is_mlflow_available,
    is_mlu_available as is_mlu_available, is_mps_available as is_mps_available,
    is_msamp_available as is_msamp_available, is_musa_available as is_musa_available,
    is_neptune_available as is_neptune_available, is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available, is_optuna_available as is_optuna_available,
    is_pandas_available as is_pandas_available, is_peft_available as is_peft_available,
    is_pippy_available as is_pippy_available, is_pynvml_available as is_pynvml_available,
    is_pytest_available as is_pytest_available, is_ray_available as is_ray_available,
    is_ray_tune_available as is_ray_tune_available, is_rich_available as is_rich_available,
    is_rocm_available as is_rocm_available, is_sagemaker_available as is_sagemaker_available,
    is_schedulefree_available as is_schedulefree_available, is_sdaa_available as is_sdaa_available,
    is_swanlab_available as is_swanlab_available, is_tensorboard_available as is_tensorboard_available,
    is_timm_available as is_timm_available,
    is_torch_distributed_available as is_torch_distributed_available,
    is_torch_xla_available as is_torch_xla_available, is_torchao_available as is_torchao_available,
    is_torchdata_available as is_torchdata_available,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    is_torchvision_available as is_torchvision_available, is_tqdm_available as is_tqdm_available,
    is_trackio_available as is_trackio_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_transformers_available as is_transformers_available, is_triton_available as is_triton_available,
    is_wandb_available as is_wandb_available, is_weights_only_available as is_weights_only_available,
    is_xccl_available as is_xccl_available, is_xpu_available as is_xpu_available,
)
from windlass.utils.other import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors, convert_bytes as convert_bytes,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    get_module_children_bottom_up as get_module_children_bottom_up, get_pretty_name as get_pretty_name,
    is_port_in_use as is_port_in_use, load as load, merge_dicts as merge_dicts,
    model_has_dtensor as model_has_dtensor, recursive_getattr as recursive_getattr, save as save,
    wait_for_everyone as wait_for_everyone, write_basic_config as write_basic_config,
)
from windlass.utils.other import tqdm as tqdm
from windlass.utils.versions import (
    compare_versions as compare_versions, is_torch_version as is_torch_version,
)
from windlass.zero.building import HfDeepSpeedConfig as HfDeepSpeedConfig
