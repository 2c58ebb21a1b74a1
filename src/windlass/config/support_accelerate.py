"""The rows of the support table on `Accelerator`: its arguments, methods and properties, as data."""

from __future__ import annotations

_NO_DEEPSPEED = "DeepSpeed is not built; fsdp_plugin shards as its stages 2 and 3 do"

ARGUMENTS_HONOURED = """
device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config
fsdp_plugin rng_types log_with project_dir project_config gradient_accumulation_plugin
step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin parallelism_config
scheduler_unit
"""

ARGUMENTS_MAPPED: dict[str, str] = {}

ARGUMENTS_REFUSED = {
    "deepspeed_plugin": _NO_DEEPSPEED,
    "deepspeed_plugins": _NO_DEEPSPEED,
    "megatron_lm_plugin": "Megatron-LM is not built; shard the model with fsdp_plugin",
    "torch_tp_plugin": "tensor parallelism is not built; a tp_size of 1 is accepted",
}

MEMBERS_HONOURED = """
prepare prepare_model prepare_data_loader prepare_optimizer prepare_scheduler unwrap_model
accumulate no_sync trigger_sync_in_backward join_uneven_inputs backward
clip_grad_norm_ clip_grad_value_ unscale_gradients optimizer_step_was_skipped sync_gradients
gradient_accumulation_steps autocast profile
gather gather_for_metrics reduce pad_across_processes split_between_processes set_trigger check_trigger
wait_for_everyone main_process_first local_main_process_first print
on_main_process on_local_main_process on_last_process on_process on_local_process
init_trackers get_tracker log end_training
save_state load_state register_for_checkpointing register_save_state_pre_hook register_load_state_pre_hook
save_model get_state_dict skip_first_batches free_memory clear verify_device_map
device distributed_type num_processes process_index local_process_index use_distributed multi_device
is_main_process is_local_main_process is_last_process mixed_precision is_fsdp2 is_composable_parallelism_enabled
parallelism_config torch_device_mesh data_parallel_rank data_parallel_shard_rank should_save_model
split_batches dispatch_batches non_blocking use_stateful_dataloader project_dir logging_dir save_iteration
"""

MEMBERS_MAPPED = {
    "even_batches": "is kept as set; every process gets the same number of batches, and no sample comes twice",
    "use_seedable_sampler": "True gives the very order of accelerate's SeedableRandomSampler; the order of samples "
    "follows from a seed in any case",
    "save": "writes safetensors (a name in .safetensors) or JSON (.json); other endings are refused, for pickle is "
    "never written",
    "fp8_backend": "is always NO: eight-bit training is not built",
    "deepspeed_plugin": "is always None: DeepSpeed is not built",
    "tensor_parallel_rank": "is always 0: tensors are not split further",
    "context_parallel_rank": "is always 0: sequences are not split",
    "maybe_context_parallel": "does nothing: sequences are not split, and a cp_size above 1 is refused",
}

MEMBERS_REFUSED = {
    "lomo_backward": "LOMO is not built; prepare another optimizer and call backward",
    "pipeline_parallel_rank": "pipelines are not built",
    "deepspeed_ulysses_dl_adapter": "DeepSpeed's sequence parallelism is not built; prepare the loader",
}
