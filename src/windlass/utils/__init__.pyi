import windlass.core.logs as _logs

logging = _logs

from windlass.accelerator.forward import (
    extract_model_from_parallel as extract_model_from_parallel, is_compiled_module as is_compiled_module,
)
from windlass.accelerator.zero_engines import (
    DummyOptim as DummyOptim, DummyScheduler as DummyScheduler,
)
from windlass.compat.compiled_regions import (
    compile_regions as compile_regions, has_compiled_regions as has_compiled_regions,
)
from windlass.utils.dataclasses import *
from windlass.utils.memory import *
from windlass.utils.modeling import *
from windlass.utils.offload import *
from windlass.utils.operations import *
from windlass.utils.random import *
from windlass.utils.constants import (
    SAFE_MODEL_NAME as SAFE_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
)
from windlass.utils.environment import (
    are_libraries_initialized as are_libraries_initialized, clear_environment as clear_environment,
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
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
    tqdm as tqdm, wait_for_everyone as wait_for_everyone, write_basic_config as write_basic_config,
)
from windlass.utils.versions import (
    compare_versions as compare_versions, is_torch_version as is_torch_version,
)
from windlass.zero.building import HfDeepSpeedConfig as HfDeepSpeedConfig
