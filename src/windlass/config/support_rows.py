"""The rows of the support table, as data. Those of the arguments are declared with the arguments (`sections/`)."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.config.sections.saving import HUB

_WRITTEN = "metrics.jsonl is always written, and ReportCallback adds report.html"
TRACKER_NOTE = f"is not built; {_WRITTEN}; a callback or a GeneralTracker of your own can send logs on"

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


def unbuilt_optimizer(name: str) -> str | None:
    """Why optimizer `name` cannot be used; None when it can."""
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
    "push_to_hub": HUB,
    "init_hf_repo": HUB,
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
