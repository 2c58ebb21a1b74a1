"""What scripts override of other libraries' loops, and the loop of Windlass does not call."""

from __future__ import annotations

from windlass.config.arguments import TrainingArguments

_CHECKPOINTS = "override `_save_checkpoint`, `_save` or `_load_from_checkpoint`"
SAVED = "a checkpoint is written as a whole: call super()._save_checkpoint(model, trial), and write yours beside it"
_SAVED = f"set save_only_model=True to save no such part, or {_CHECKPOINTS}"
_PREPARED = "the engine prepares model and optimizer together; override `create_optimizer`, or wrap the model yourself"
_DEVICE = "set use_cpu, or CUDA_VISIBLE_DEVICES"
_LAUNCHER = "they are those of the processes that were launched"
_PARALLEL = "set parallelism_config"
_SEARCH = "pass `hp_space` and `compute_objective` to `hyperparameter_search`"
_CLIPPING = "set max_grad_norm, or use a callback's on_pre_optimizer_step"
# Of a Trainer and of its Accelerator: a run calls them where each gradient is whole on a process.
CLIP, CLIP_OF_ACCELERATOR = "_clip_grad_norm", "clip_grad_norm_"
CLIP_ELSEWHERE = (
    "it is called where gradients are whole on each process: on one, or under data parallelism, without DeepSpeed or "
    f"updates in the backward. Leave it out: {_CLIPPING}"
)
# Of a Trainer: what a run calls between updates, and what to do with one for the arguments of older versions.
BETWEEN = "_maybe_log_save_evaluate"
OTHER_ARGUMENTS = (
    "let it take (self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, "
    "learning_rate=None), as transformers 5 passes them"
)
# Of a Trainer: parts of a checkpoint, which a run writes as a whole. Overrides are called after that.
SAVED_PARTS = ("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler")
# Of a Trainer: a run calls an override that calls the inherited method, as `super()` does, and no copy of another loop.
CALLED_AROUND = {
    "_inner_training_loop": "override `training_step`, `compute_loss` or use a callback, or call "
    "super()._inner_training_loop(...) in it",
    "_evaluate": "override `evaluate`, or call super()._evaluate(...) in it",
    **dict.fromkeys(SAVED_PARTS, f"call the inherited one in it, by super(); {_SAVED}"),
}
# Of a Trainer: parts of another library's loop.
NEVER_CALLED = {
    "_run_epoch": "override `training_step`, `compute_loss` or use a callback",
    "_prepare_for_training": "use a callback's on_train_begin",
    "_init_training_state": "use a callback's on_train_begin",
    "_finalize_training": "use a callback's on_train_end",
    "set_initial_training_values": "set max_steps or num_train_epochs",
    "_nested_gather": "the engine joins what ranks found itself; override `evaluation_loop` or `prediction_step`",
    "prediction_loop": "override `evaluation_loop`",
    "_get_grad_norm": _CLIPPING,
    "_track_num_input_tokens": "override `log`",
    "_get_output_dir": "set output_dir",
    "_load_scaler": _CHECKPOINTS,
    "_load_callback_state": _CHECKPOINTS,
    "_rotate_checkpoints": "set save_total_limit",
    "_push_from_checkpoint": "set hub_strategy='end', or use a callback's on_save",
    "_validate_args": "check them in the constructor",
    "_build_accelerator_args": "set accelerator_config, and the arguments of the engine",
    "get_total_train_batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "get_sp_size": _PARALLEL,
    "get_cp_size": _PARALLEL,
    "get_tp_size": _PARALLEL,
    "_prepare_context_parallel_inputs": "override `_prepare_inputs`",
    "_hp_search_setup": _SEARCH,
    "_report_to_hp_search": _SEARCH,
    "store_flos": "override `floating_point_ops`",
}


def idle(args: TrainingArguments, divides_sequences: bool) -> set[str]:
    """The methods of a Trainer that the other loop does not call with these arguments: an override has no effect there
    either. `divides_sequences`: among processes.
    """
    names = set() if args.push_to_hub and args.hub_strategy != "end" else {"_push_from_checkpoint"}
    if not divides_sequences:
        names.add("_prepare_context_parallel_inputs")
    if args.save_only_model:
        names.update(SAVED_PARTS)
    return names


# Of its Accelerator, in a class or assigned.
OF_ACCELERATOR = {
    "prepare": _PREPARED,
    "prepare_model": _PREPARED,
    "prepare_optimizer": _PREPARED,
    "prepare_data_loader": "override `get_train_dataloader`",
    "no_sync": "the engine reduces gradients once an update",
    "gather_for_metrics": "override `evaluation_loop` or `prediction_step`",
}
# Of a class of arguments.
OF_ARGUMENTS = {
    "should_save": "set save_strategy and save_on_each_node",
    "_setup_devices": _DEVICE,
    "n_gpu": _DEVICE,
    "world_size": _LAUNCHER,
    "process_index": _LAUNCHER,
    "local_process_index": _LAUNCHER,
    "parallel_mode": _LAUNCHER,
    "ddp_timeout_delta": "set ddp_timeout",
    "_process_fsdp_args": "set fsdp and fsdp_config",
}
