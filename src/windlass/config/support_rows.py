"""Rows of the support table that nothing else in `config/` declares: the names are defined on higher floors."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.config.plugin_words import LoggerType

_WRITTEN = "metrics.jsonl is always written, and ReportCallback adds report.html"
TRACKER_NOTE = f"is not built; {_WRITTEN}; a callback or a GeneralTracker of your own can send logs on"

PROJECTING_OPTIMIZERS = (
    "galore_adamw", "galore_adafactor", "galore_adamw_layerwise", "galore_adafactor_layerwise", "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise", "apollo_adamw", "apollo_adamw_layerwise",
)  # fmt: skip
IN_BACKWARD_OPTIMIZERS = (
    "lomo",
    "adalomo",
    *(name for name in PROJECTING_OPTIMIZERS if name.endswith("_layerwise")),
)
OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adafactor", "sgd", "adagrad",
    "rmsprop", "muon", "lion_32bit", "ademamix",
    "stable_adamw", "grokadamw", "adamw_anyprecision", "schedule_free_adamw", "schedule_free_radam",
    "schedule_free_sgd", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit",
    "paged_adamw_8bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "ademamix_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit", "lomo", "adalomo",
    *PROJECTING_OPTIMIZERS,
)  # fmt: skip
GONE_OPTIMIZERS = {
    "adamw_hf": "is gone; use adamw_torch",
    "adamw_apex_fused": "is gone; use adamw_torch_fused",
}
# Part of a name -> end of the sentence "NAME is not built yet".
OPTIMIZER_ADVICE = {
    "npu": " (it needs torch_npu, on whose devices Windlass does not train); use adamw_torch_fused",
    **dict.fromkeys(("galore", "lomo"), "; adafactor keeps the smallest state of those that are"),
}
TRACKERS = tuple(sorted(kind.value for kind in LoggerType if kind is not LoggerType.ALL))
UNBUILT_TRACKERS = ("azure_ml", "codecarbon", "dagshub", "flyte", "kubeflow", "neptune")


def unbuilt_optimizer(name: str) -> str | None:
    """Why optimizer `name` cannot be used; None if it can."""
    if name in OPTIMIZERS:
        return None
    advice = next((note for start, note in OPTIMIZER_ADVICE.items() if start in name), "")
    return f"is not built yet{advice or '; use one of ' + ', '.join(OPTIMIZERS)}"


def unbuilt_trackers(report_to: list[str]) -> Iterator[tuple[str, str]]:
    """Each name of `report_to` that cannot be reported to, and why."""
    for name in report_to:
        if name in UNBUILT_TRACKERS:
            yield name, TRACKER_NOTE
        elif name not in (*TRACKERS, "all"):
            yield name, f"is not a tracker; known names: all, none, {', '.join(TRACKERS)}"


CONSTRUCTOR = """
model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func compute_metrics
callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics
"""
CONSTRUCTOR_MAPPED = {"tokenizer": "is now processing_class", "callback": "is used as callbacks"}

TUNER = """
model args data_collator train_dataset eval_dataset processing_class compute_metrics callbacks optimizers
optimizer_cls_and_kwargs preprocess_logits_for_metrics quantization_config peft_config formatting_func
"""
TUNER_MAPPED = {
    "compute_loss_func": "is used, with a warning and a second forward for the figures; override compute_loss instead",
    "tokenizer": "is now processing_class",
    "dataset_text_field": "is now a field of SFTConfig",
    "max_seq_length": "is now max_length of SFTConfig",
    "packing": "is now a field of SFTConfig",
}
TRL_NAMES = """
SFTTrainer SFTConfig ModelConfig ScriptArguments DatasetMixtureConfig TrlParser get_dataset get_peft_config
get_quantization_config get_kbit_device_map clone_chat_template get_training_chat_template apply_chat_template
maybe_apply_chat_template is_conversational is_conversational_from_value maybe_convert_to_chatml extract_prompt
maybe_extract_prompt unpair_preference_dataset maybe_unpair_preference_dataset pack_dataset supports_tool_calling
"""
TRL_MAPPED = {"trl sft": "is `windlass train` with a recipe; `windlass convert-config FILE` makes one"}
_NOT_TUNING = "is not built; `windlass run` runs scripts with TRL's own on this engine"
TRL_REFUSED = {
    **dict.fromkeys(
        ("DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer", "DistillationTrainer"),
        _NOT_TUNING,
    ),
    "prepare_multimodal_messages": "is not built: images are not trained on yet",
    "add_response_schema": "is not built: answers are not parsed",
}

METHODS = """
train evaluate predict evaluation_loop prediction_step training_step compute_loss compute_loss_context_manager
autocast_smart_context_manager create_optimizer create_scheduler create_optimizer_and_scheduler
get_optimizer_cls_and_kwargs get_decay_parameter_names get_train_dataloader get_eval_dataloader get_test_dataloader
num_examples set_initial_training_values get_total_train_batch_size save_model save_state create_model_card push_to_hub
init_hf_repo end
save_metrics log log_metrics metrics_format store_flos floating_point_ops call_model_init add_callback pop_callback
remove_callback is_local_process_zero is_world_process_zero create_accelerator_and_postprocess
get_learning_rates get_num_trainable_parameters get_optimizer_group
"""
METHODS_MAPPED = {
    "get_batch_samples": "may be called; an override is refused, because the loader yields whole updates",
    "get_sp_size": "is 1: sequence parallelism is not built yet",
    "get_cp_size": "is 1: context parallelism is not built yet",
    "get_tp_size": "is 1: tensor parallelism is not built yet",
}
METHODS_REFUSED = {
    "hyperparameter_search": "is not built yet; call train() in a loop over TrainingArguments, with model_init",
}

SEQ2SEQ = "evaluate predict prediction_step load_generation_config"

CALLBACKS = """
DefaultFlowCallback ProgressCallback PrinterCallback NotebookProgressCallback EarlyStoppingCallback TrainerCallback
"""
CALLBACKS_REFUSED = {
    "JITCheckpointCallback": "is not needed: each run saves and exits on the signals in preemption_signals",
}
COLLATORS = """
default_data_collator DefaultDataCollator DataCollatorWithPadding DataCollatorForTokenClassification
DataCollatorForMultipleChoice DataCollatorForSeq2Seq DataCollatorForLanguageModeling
DataCollatorForPermutationLanguageModeling DataCollatorWithFlattening
"""

ACCELERATOR = """
device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config
deepspeed_plugin deepspeed_plugins
fsdp_plugin rng_types log_with project_dir project_config gradient_accumulation_plugin
step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin parallelism_config
scheduler_unit
"""

ACCELERATOR_REFUSED = {
    "megatron_lm_plugin": "Megatron-LM is not built; shard the model with fsdp_plugin",
    "torch_tp_plugin": "tensor parallelism is not built; a tp_size of 1 is accepted",
}

SAFETENSORS = "safe_serialization=False is mapped to True, with one warning: pickle is never written"
MEMBERS = """
prepare prepare_model prepare_data_loader prepare_optimizer prepare_scheduler unwrap_model
accumulate no_sync trigger_sync_in_backward join_uneven_inputs backward lomo_backward
clip_grad_norm_ clip_grad_value_ unscale_gradients optimizer_step_was_skipped sync_gradients
gradient_accumulation_steps autocast profile
gather gather_for_metrics reduce pad_across_processes split_between_processes set_trigger check_trigger
wait_for_everyone main_process_first local_main_process_first print
on_main_process on_local_main_process on_last_process on_process on_local_process
init_trackers get_tracker log end_training
load_state register_for_checkpointing register_save_state_pre_hook register_load_state_pre_hook
get_state_dict skip_first_batches free_memory clear verify_device_map
deepspeed_plugin device distributed_type num_processes process_index local_process_index use_distributed multi_device
is_main_process is_local_main_process is_last_process mixed_precision is_fsdp2 is_composable_parallelism_enabled
parallelism_config torch_device_mesh data_parallel_rank data_parallel_shard_rank should_save_model
split_batches dispatch_batches non_blocking use_stateful_dataloader project_dir logging_dir save_iteration
"""

MEMBERS_MAPPED = {
    "even_batches": "has no effect: all processes get the same number of batches, and no sample is repeated",
    "use_seedable_sampler": "True shuffles in the order of accelerate's SeedableRandomSampler; the order of samples "
    "follows from a seed in any case",
    "save_state": SAFETENSORS,
    "save_model": SAFETENSORS,
    "save": "writes safetensors (a name in .safetensors) or JSON (.json); of another name, such as model.pt, it writes "
    "model.pt.json and model.pt.safetensors, with one warning: pickle is never written",
    "fp8_backend": "is AO or NO: torchao is the only backend",
    "tensor_parallel_rank": "is always 0: tensors are not split further",
    "context_parallel_rank": "is always 0: sequences are not split",
    "maybe_context_parallel": "does nothing: sequences are not split, and a cp_size above 1 is refused",
}

MEMBERS_REFUSED = {
    "pipeline_parallel_rank": "pipelines are not built",
    "deepspeed_ulysses_dl_adapter": "it is for DeepSpeed's sequence parallelism, which ZeRO does not need; prepare "
    "the loader",
}
