"""Names that scripts import from their old library and Windlass does not have, each with the reason.

The modules of these names raise an ImportError with the reason; `docs/compatibility.md` lists them.
"""

from __future__ import annotations

from windlass.core.lazy import reverse

DEEPSPEED = (
    "a run, or Accelerator.prepare, makes the engine of DeepSpeed itself, and has no wrappers around it"
)
_HF_DEEPSPEED = "it divides models while they are built: import it from transformers.integrations.deepspeed"
_MEGATRON = "Megatron-LM is not built; shard the model with fsdp_plugin"
_EIGHT_BIT = (
    "weights of few bits are loaded by from_pretrained(quantization_config=...), and mixed_precision='fp8' converts "
    "layers to torchao's float8"
)
_PIPELINE = "it is a part of prepare_pippy, which is built otherwise; call prepare_pippy"
TPU = "one process drives all devices of PyTorch/XLA, with the loaders and the sums of any other device"
_PODS = "jobs on pods of TPUs are not started; start the script itself on one machine with TPUs"
SAGEMAKER = "SageMaker's own way to split models is not built; shard the model with fsdp_plugin"
_PICKLE = "it is about files of pickled tensors, which are never written, and read in a process of their own"
_LAUNCHER = "`windlass launch` starts processes by itself"
_SHARDING = "sharded models are prepared, saved and loaded by Accelerator and Trainer"
_OWN_NAMES = "checkpoints have a layout of their own; save_state and load_state, or the Trainer, know it"
_OFFLOADED = "weights are offloaded into safetensors files, which OffloadedWeightsLoader reads"
SEARCH = "is a part of the search of transformers; Trainer.hyperparameter_search(backend=...) has its own"
_LAYERWISE = (
    "an optimizer that updates layer by layer, such as optim='galore_adamw_layerwise', needs no stand-in"
)
_BY_REPORT_TO = "name the tracker in report_to: there is no callback of its own"
_NOT_A_TRACKER = "this tracker is not built; a GeneralTracker or a callback of your own can send logs to it"
_MODELS = "it belongs to the models of transformers; import it from there, its models train as they are"
NEFTUNE = "a run adds the noise itself and takes it away: set neftune_noise_alpha"
_LIGER = "a run replaces parts of the model itself: set use_liger_kernel=True"
_SIGNALS = "every run saves and leaves on the signals that preemption_signals names"
_LOADERS = "one class reads prepared data, whatever it comes from; prepare the loader with Accelerator"
INSIDE = "it is a detail of how that library works inside"

REFUSED: dict[str, tuple[str, ...]] = {
    DEEPSPEED: (
        "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "compile_regions_deepspeed",
        "deepspeed", "deepspeed_config", "deepspeed_init", "deepspeed_load_checkpoint", "deepspeed_optim_sched",
        "deepspeed_required", "map_pytorch_optim_to_deepspeed", "prepare_deepspeed_cmd_env",
    ),
    "it is DeepSpeed's own: import it from deepspeed.zero": ("GatheredParameters",),
    _HF_DEEPSPEED: (
        "HfTrainerDeepSpeedConfig", "set_hf_deepspeed_config", "unset_hf_deepspeed_config",
    ),
    "AcceleratorState().deepspeed_plugin is the selected one": ("get_active_deepspeed_plugin",),
    _MEGATRON: (
        "AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "MegatronEngine", "MegatronLMDummyDataLoader",
        "MegatronLMDummyScheduler", "MegatronLMOptimizerWrapper", "MegatronLMSchedulerWrapper", "T5TrainStep",
        "add_model_config_to_megatron_parser", "avg_losses_across_data_parallel_group",
        "gather_across_data_parallel_groups", "megatron_lm_initialize", "megatron_lm_prepare_data_loader",
        "megatron_lm_prepare_model_optimizer_scheduler", "megatron_lm_prepare_optimizer",
        "megatron_lm_prepare_scheduler",
    ),
    _EIGHT_BIT: (
        "apply_fp8_autowrap", "check_cuda_fp8_capability", "contextual_fp8_autocast", "convert_model",
        "convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "has_4bit_bnb_layers", "has_ao_layers",
        "has_transformer_engine_layers", "load_and_quantize_model",
        "torchao_required",
    ),
    _PIPELINE: ("build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward"),
    TPU: (
        "IS_XLA_FSDPV2_POST_2_2", "MpDeviceLoaderWrapper", "get_tpu_sampler", "install_xla", "nested_xla_mesh_reduce",
    ),
    SAGEMAKER: ("smp_forward_backward", "smp_forward_only", "smp_gather", "smp_nested_concat"),
    _PICKLE: (
        "MODEL_NAME", "OPTIMIZER_NAME_BIN", "TRAINING_ARGS_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME",
        "WEIGHTS_PATTERN_NAME", "safe_globals",
    ),
    _LAUNCHER: (
        "PrepareForLaunch", "TORCH_LAUNCH_PARAMS", "check_cuda_p2p_ib_support", "check_os_kernel",
        "convert_dict_to_env_variables", "get_cpu_distributed_information", "get_gpu_info", "prepare_multi_gpu_env",
        "prepare_sagemager_args_inputs", "prepare_simple_launcher_cmd_env", "prepare_tpu", "set_numa_affinity",
    ),
    _SHARDING: (
        "FSDP_MODEL_NAME", "compile_regions_fsdp2", "ensure_weights_retied", "fsdp2_apply_ac",
        "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict", "fsdp2_prepare_model",
        "fsdp2_switch_optimizer_parameters", "get_fsdp2_grad_scaler", "load_fsdp_model", "load_fsdp_optimizer",
        "merge_fsdp_weights", "save_fsdp_model", "save_fsdp_optimizer",
    ),
    _OWN_NAMES: (
        "CheckpointManager", "OPTIMIZER_NAME", "PROFILE_PATTERN_NAME", "RNG_STATE_NAME", "SAMPLER_NAME", "SCALER_NAME",
        "SCHEDULER_NAME",
    ),
    _OFFLOADED: ("load_offloaded_weight", "load_offloaded_weights"),
    SEARCH: (
        "ALL_HYPERPARAMETER_SEARCH_BACKENDS", "HyperParamSearchBackendBase", "OptunaBackend", "RayTuneBackend",
        "WandbBackend", "default_hp_search_backend", "run_hp_search_optuna", "run_hp_search_ray",
        "run_hp_search_wandb",
    ),
    _LAYERWISE: ("LayerWiseDummyOptimizer", "LayerWiseDummyScheduler"),
    _NOT_A_TRACKER: (
        "FlyteCallback", "KubeflowCallback", "WandbLogModel", "save_model_architecture_to_file",
    ),
    _BY_REPORT_TO: (
        "AzureMLCallback", "CodeCarbonCallback", "DagsHubCallback", "NeptuneCallback", "NeptuneMissingConfiguration",
    ),
    NEFTUNE: ("activate_neftune", "deactivate_neftune", "neftune", "neftune_post_forward_hook"),
    _LIGER: ("apply_liger_kernel", "liger"),
    _MODELS: (
        "ALL_PARALLEL_STYLES", "BitLinear", "Bnb4bitQuantize", "CompressedTensorsFP8Linear", "FP8Embedding",
        "FP8Linear", "FbgemmFp8Linear", "FbgemmFp8Llama4TextExperts", "GGUF_CONFIG_DEFAULTS_MAPPING",
        "GGUF_CONFIG_MAPPING", "HiggsLinear", "LayerRepository", "MetalLinear", "Mxfp4GptOssExperts", "NVFP4Linear",
        "NVFP4Quantize", "PeftAdapterMixin", "QuantizedEmbedding", "QuantizedLinear", "SinqDeserialize",
        "SinqQuantize", "TorchExportableModuleWithStaticCache", "apply_srq", "aqlm", "awq",
        "batched_mm_experts_forward", "bitnet", "bitsandbytes", "compressed_tensors", "convert_and_export_with_cache",
        "convert_moe_packed_tensors", "dequantize_and_replace", "dequantize_higgs", "eetq", "executorch", "fbgemm_fp8",
        "finegrained_fp8", "flex_attention", "fsdp", "gemma_quant", "ggml", "grouped_mm_experts_forward", "higgs",
        "hqq", "hub_kernels", "kernelize", "lazy_load_kernel", "make_flex_block_causal_mask", "metal_quantization",
        "moe", "mxfp4", "nvfp4", "pack_weights", "peft", "post_init_awq_exllama_modules", "prepare_for_hqq_linear",
        "quantize_to_mxfp4", "quantize_with_higgs", "quanto", "register_kernel_mapping",
        "replace_kernel_forward_from_hub", "replace_quantization_scales", "replace_with_aqlm_linear",
        "replace_with_awq_linear", "replace_with_bitnet_linear", "replace_with_bnb_linear",
        "replace_with_compressed_tensors_fp8_linear", "replace_with_eetq_linear", "replace_with_fbgemm_fp8_linear",
        "replace_with_fp8_embedding", "replace_with_fp8_linear", "replace_with_higgs_linear",
        "replace_with_metal_linear", "replace_with_mxfp4_linear", "replace_with_nvfp4_linear",
        "replace_with_quant_layers", "replace_with_quanto_layers", "replace_with_spqr_linear",
        "replace_with_vptq_linear", "shard_and_distribute_module", "sinq", "spqr", "swizzle_mxfp4", "tensor_parallel",
        "unpack_weights", "use_experts_implementation", "use_kernel_forward_from_hub", "use_kernel_func_from_hub",
        "use_kernel_func_from_hub_with_fallback", "use_kernelized_func", "validate_bnb_backend_availability", "vptq",
    ),
    _SIGNALS: ("JITCheckpointCallback",),
    _LOADERS: ("DataLoaderAdapter",),
    INSIDE: (
        "DataClass", "DataClassType", "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
        "OptimizerContext", "OptimizerHandler", "SharedDict", "TORCH_DISTRIBUTED_OPERATION_TYPES",
        "ThreadLocalSharedDict", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION", "check_tied_parameters_in_config",
        "do_nothing", "get_grad_scaler", "get_mixed_precision_context_manager", "get_model_tp_size",
        "id_tensor_storage", "integration_utils", "is_fsdp_enabled",
        "patch_optimizer_step", "test_launch",
    ),
}  # fmt: skip
COMMANDS = {
    "`windlass` on the command line has launch, config, env, estimate-memory, merge-weights and test": (
        "accelerate_cli", "config", "env", "estimate", "launch", "menu", "merge", "test", "utils",
    ),
    "sharding is FSDP2 from the start; old files of `config` are read as they are": ("to_fsdp2",),
    _PODS: ("tpu",),
}  # fmt: skip

WHY = reverse(REFUSED)
WHY_NOT_COMMANDS = reverse(COMMANDS)
