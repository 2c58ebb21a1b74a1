"""The rows of the support table, as data. A feature that gets built moves its name from REFUSED to HONOURED here."""

from __future__ import annotations

_HUB = "needs publishing to the hub, which is not built yet; save_model() writes what an upload needs"
_DEEPSPEED = "is not built yet; fsdp=True shards parameters, gradients and optimizer state"
_WRITTEN = "metrics.jsonl is always written, and ReportCallback adds report.html"
TRACKER_NOTE = f"is not built; {_WRITTEN}; a callback or a GeneralTracker of your own can send logs on"

HONOURED = """
output_dir per_device_train_batch_size num_train_epochs max_steps
learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
gradient_accumulation_steps max_grad_norm label_smoothing_factor
bf16 fp16 bf16_full_eval fp16_full_eval tf32
activation_checkpointing activation_checkpointing_kwargs
torch_compile torch_compile_backend torch_compile_mode
use_cache torch_empty_cache_steps
logging_strategy logging_steps logging_first_step log_on_each_node include_num_input_tokens_seen
log_level log_level_replica disable_tqdm
eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics
save_only_model save_strategy save_steps save_total_limit
preemption_signals preemption_deadline keep_last keep_best save_every save_in_background save_host_memory
max_save_failures
load_best_model_at_end metric_for_best_model greater_is_better
restore_callback_states_from_checkpoint resume_from_checkpoint
full_determinism seed data_seed
use_cpu accelerator_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order dataloader_start_timeout
remove_unused_columns label_names train_sampling_strategy length_column_name
fsdp fsdp_config
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
skip_memory_metrics do_train do_eval do_predict
report_to run_name project trackio_space_id trackio_bucket_id
nonfinite_policy global_batch_size auto_find_batch_size
"""

MAPPED = {
    "enable_jit_checkpoint": "is always so: preemption_signals says on which signals a run saves and leaves",
    "gradient_checkpointing": "is the older name of activation_checkpointing; setting either sets both",
    "gradient_checkpointing_kwargs": "is the older name of activation_checkpointing_kwargs; setting either sets both",
    "average_tokens_across_devices": "is always so; False is refused",
    "logging_nan_inf_filter": "filters nothing: non-finite losses are logged as they are, and nonfinite_policy decides",
    "parallelism_config": "gives the numbers of copies and of shards; other axes than those two are refused",
    "save_on_each_node": "is for the final model: checkpoints are written on every disk that is found, always",
    "local_rank": "is read from the launcher's environment; a value that disagrees is refused",
}

REFUSED = {
    "optim_target_modules": "needs a projecting optimizer (GaLore, APOLLO), none of which is built yet",
    "use_liger_kernel": "is not built yet; torch_compile=True fuses much of the same",
    "liger_kernel_config": "needs use_liger_kernel, which is not built yet",
    "neftune_noise_alpha": "is not built yet",
    "trackio_static_space_id": "is not built; trackio.freeze(...) after training makes a static space",
    "eval_use_gather_object": "is not built yet; tensors in nested tuples, lists and dicts are gathered",
    "ignore_data_skip": "is not built yet; a resumed run finds its place in the data, or says what it reads again",
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "deepspeed": _DEEPSPEED,
    "debug": "is not built yet; nonfinite_policy says which step and which samples went wrong",
}

ACCELERATOR_MAPPED = {
    "even_batches": "is never done: uneven last batches are shared out, no sample is repeated",
    "use_seedable_sampler": "is always so: the order of samples follows from the seed",
    "non_blocking": "is always so from pinned memory",
}
ACCELERATOR_REFUSED = {
    "split_batches": "is not built: set per_device_train_batch_size to the whole batch divided by the processes",
    "dispatch_batches": "is not built: every process reads its own share of the data",
    "use_configured_state": "is not built: the state of the processes is read from the environment",
}

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
GONE_OPTIMIZERS = {
    "adamw_hf": "is gone; use adamw_torch",
    "adamw_apex_fused": "is gone; use adamw_torch_fused",
}
# Part of a name -> how the sentence "NAME is not built yet" goes on.
OPTIMIZER_ADVICE = {
    "xla": " (it needs PyTorch/XLA); use adamw_torch",
    "npu": "; use adamw_torch_fused",
    "galore": "; adafactor keeps the smallest state of those that are",
    "lomo": "; adafactor keeps the smallest state of those that are",
    "8bit": "; adafactor keeps the smallest state of those that are",
    "4bit": "; adafactor keeps the smallest state of those that are",
}
TRACKERS = (
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip
UNBUILT_TRACKERS = ("azure_ml", "codecarbon", "dagshub", "flyte", "kubeflow", "neptune")

HELPERS = """
train_batch_size eval_batch_size ddp_timeout_delta device n_gpu parallel_mode world_size process_index
local_process_index should_log should_save place_model_on_device get_process_log_level main_process_first
get_warmup_steps to_dict to_json_string to_sanitized_dict
set_training set_evaluate set_testing set_save set_logging set_push_to_hub set_optimizer set_lr_scheduler set_dataloader
"""

CONSTRUCTOR = """
model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func compute_metrics
callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics
"""
CONSTRUCTOR_MAPPED = {"tokenizer": "is now processing_class", "callback": "is taken as callbacks"}

METHODS = """
train evaluate predict evaluation_loop prediction_step training_step compute_loss compute_loss_context_manager
autocast_smart_context_manager create_optimizer create_scheduler create_optimizer_and_scheduler
get_optimizer_cls_and_kwargs get_decay_parameter_names get_train_dataloader get_eval_dataloader get_test_dataloader
num_examples set_initial_training_values get_total_train_batch_size save_model save_state create_model_card end
save_metrics log log_metrics metrics_format store_flos floating_point_ops call_model_init add_callback pop_callback
remove_callback is_local_process_zero is_world_process_zero create_accelerator_and_postprocess
get_learning_rates get_num_trainable_parameters get_optimizer_group
"""
METHODS_MAPPED = {
    "get_batch_samples": "may be called; an override is refused, for the loader yields all micro-batches of an update",
    "get_sp_size": "is 1: sequence parallelism is not built yet",
    "get_cp_size": "is 1: context parallelism is not built yet",
    "get_tp_size": "is 1: tensor parallelism is not built yet",
}
METHODS_REFUSED = {
    "hyperparameter_search": "is not built yet; call train() in a loop over TrainingArguments, with model_init",
    "push_to_hub": _HUB,
    "init_hf_repo": _HUB,
}

CALLBACKS = """
DefaultFlowCallback ProgressCallback PrinterCallback NotebookProgressCallback EarlyStoppingCallback TrainerCallback
"""
CALLBACKS_REFUSED = {
    "JITCheckpointCallback": "is not needed: every run saves and leaves on the signals that preemption_signals names",
}
COLLATORS = """
default_data_collator DefaultDataCollator DataCollatorWithPadding DataCollatorForTokenClassification
DataCollatorForMultipleChoice DataCollatorForSeq2Seq DataCollatorForLanguageModeling
DataCollatorForPermutationLanguageModeling DataCollatorWithFlattening
"""
