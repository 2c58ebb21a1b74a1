"""The rules that need the data or the process, and the frozen plan of a configuration that meets them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from windlass.assemble import batch
from windlass.assemble.batch import update_size
from windlass.assemble.engine_values import engine_clipping, with_engine
from windlass.assemble.facts import Facts
from windlass.config.parallel import (
    Parallel,
    from_arguments,
    from_environment,
    merge,
    plan_parallel,
    uses_deepspeed,
)
from windlass.config.parallel.rows_training import DDP_FIND_UNUSED
from windlass.config.plan import (
    BatchPlan,
    CadencePlan,
    DataPlan,
    DurationPlan,
    EvaluationPlan,
    OptimizerPlan,
    PrecisionPlan,
    PreemptionPlan,
    ReportPlan,
    RunPlan,
    SavePlan,
    SchedulePlan,
    StabilityPlan,
    TransformPlan,
    ZeroPlan,
)
from windlass.config.quantities import options_from, seconds, size_in_bytes
from windlass.config.sections.optimisation import OptimisationSection
from windlass.config.support_rows import IN_BACKWARD_OPTIMIZERS
from windlass.config.validate import check
from windlass.core.errors import ConfigError, Problem
from windlass.core.world import World, world_from_environment

# Methods of other trainers that are parts of their loop; the loop of Windlass never calls an override of them.
_CHECKPOINTS = "override `_save_checkpoint`, `_save` or `_load_from_checkpoint`"
_COLUMNS = "override `_set_signature_columns_if_needed`, or set remove_unused_columns=False"
_CLIPPING = "set max_grad_norm, or use a callback's on_pre_optimizer_step"
NEVER_CALLED = {
    "_inner_training_loop": "override `training_step`, `compute_loss` or use a callback",
    "_run_epoch": "override `training_step`, `compute_loss` or use a callback",
    "_maybe_log_save_evaluate": "override `log`, `evaluate` or `_save_checkpoint`, or set control flags in a "
    "callback",
    "_wrap_model": "the engine wraps the model itself; override `create_optimizer` or pass the wrapped model",
    "_prepare_for_training": "use a callback's on_train_begin",
    "_init_training_state": "use a callback's on_train_begin",
    "_finalize_training": "use a callback's on_train_end",
    "get_batch_samples": "the loader yields all micro-batches of an update: override `get_train_dataloader`, or "
    "`count_targets` for another denominator",
    "_get_num_items_in_batch": "override `count_targets`",
    "set_initial_training_values": "set max_steps or num_train_epochs",
    "_evaluate": "override `evaluate`",
    "_nested_gather": "the engine joins what ranks found itself; override `evaluation_loop` or `prediction_step`",
    "prediction_loop": "override `evaluation_loop`",
    "_remove_unused_columns": _COLUMNS,
    "_get_collator_with_removed_columns": _COLUMNS,
    "_clip_grad_norm": _CLIPPING,
    "_get_grad_norm": _CLIPPING,
    "_get_learning_rate": "override `log`",
    "_track_num_input_tokens": "override `log`",
    "_get_output_dir": "set output_dir",
    "_move_model_to_device": "place the model yourself and set args.place_model_on_device=False",
    "_save_rng_state": _CHECKPOINTS,
    "_save_optimizer_and_scheduler": _CHECKPOINTS,
    "_save_scaler": _CHECKPOINTS,
    "_load_rng_state": _CHECKPOINTS,
    "_load_scaler": _CHECKPOINTS,
    "_load_callback_state": _CHECKPOINTS,
    "_rotate_checkpoints": "set save_total_limit",
}
_MAX_STEPS = 10**9


def resolve(args: Any, facts: Facts) -> RunPlan:
    """The plan of a training run. Raises ConfigError with every problem found, each naming field, value and fix."""
    check(args)  # scripts may have assigned to arguments
    problems = list(_problems(args, facts))
    parallel = None
    try:
        parallel = resolve_parallel(args, facts.world)
    except ConfigError as error:
        problems += error.problems
    if problems or parallel is None:
        raise ConfigError(problems)
    duration = resolve_duration(args, facts)
    fused = _updates_in_backward(args, facts)
    return RunPlan(
        seed=args.seed,
        batch=facts.size or update_size(args, facts.world.size)[0],
        duration=duration,
        optimizer=replace(resolve_optimizer(args), in_backward=fused),
        schedule=resolve_schedule(args, duration.steps),
        precision=_precision(args, parallel),
        transforms=_transforms(args, parallel),
        stability=StabilityPlan(
            _clipping(args, fused, parallel.dist.zero), args.nonfinite_policy, bool(args.debug)
        ),
        data=resolve_data(args),
        logging=resolve_cadence(args.logging_strategy, args.logging_steps, duration.steps),
        evaluation=resolve_cadence(args.eval_strategy, args.eval_steps or args.logging_steps, duration.steps),
        save=_save(args, duration.steps),
        dist=replace(
            with_engine(args, facts, parallel, duration.steps),
            reduce_each=args.accelerator_config.sync_each_batch,
        ),
        reports=ReportPlan(
            tokens=_text(args.include_num_input_tokens_seen),  # type: ignore[arg-type]
            memory=not args.skip_memory_metrics,
            empty_cache_every=args.torch_empty_cache_steps,
            restore_callback_args=bool(args.restore_callback_states_from_checkpoint),
            evaluate_first=bool(args.eval_on_start),
        ),
    )


def _recompute_options(args: Any) -> dict[str, Any]:
    return dict(args.activation_checkpointing_kwargs or {})


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


# --- the table of rules ---------------------------------------------------------------------------------------------

Condition = Callable[[Any, Facts], Any]
_LOST_WEIGHTS = (
    "it casts the trained weights; set eval_strategy='no' and evaluate afterwards, or use bf16=True"
)
# (option, the rule is broken if, fix): `name` is the option of each row.
RULES: tuple[tuple[str, Condition, str], ...] = (
    (
        "train_dataset",
        lambda args, facts: not facts.has_training_data,
        "training needs one: pass `train_dataset=` or override `get_train_dataloader`",
    ),
    (
        "eval_strategy",
        lambda args, facts: not facts.has_evaluation_data and args.eval_strategy != "no",
        "pass `eval_dataset=`, or set eval_strategy='no'",
    ),
    (
        "save_strategy",
        lambda args, facts: not facts.has_evaluation_data and args.save_strategy == "best",
        "pass `eval_dataset=`: the best checkpoint is found by evaluating",
    ),
    (
        "max_steps",
        lambda args, facts: facts.groups_per_epoch is None and args.max_steps <= 0,
        "the training data is a stream without a length: set max_steps to the number of updates to make",
    ),
    (
        "max_steps",
        lambda args, facts: args.max_steps > _MAX_STEPS,
        f"a run makes at most {_MAX_STEPS:,} updates; is a unit wrong?",
    ),
    (
        "num_train_epochs",
        lambda args, facts: (
            args.max_steps <= 0 and args.num_train_epochs * (facts.groups_per_epoch or 0) > _MAX_STEPS
        ),
        f"with this data that is more than {_MAX_STEPS:,} updates; is a unit wrong?",
    ),
    ("bf16_full_eval", lambda args, facts: args.bf16_full_eval and args.eval_strategy != "no", _LOST_WEIGHTS),
    ("fp16_full_eval", lambda args, facts: args.fp16_full_eval and args.eval_strategy != "no", _LOST_WEIGHTS),
    (
        "ddp_find_unused_parameters",
        lambda args, facts: args.ddp_find_unused_parameters and args.ddp_static_graph,
        "a static graph uses the same parameters in every step: leave one of the two out",
    ),
    (
        "activation_checkpointing_kwargs",
        lambda args, facts: (
            _updates_in_backward(args, facts) and bool(_recompute_options(args).get("use_reentrant"))
        ),
        "a reentrant checkpoint accumulates gradients block by block, and the optimizer updates when the first part "
        "arrives: leave use_reentrant out",
    ),
    (
        "activation_checkpointing_kwargs",
        lambda args, facts: "memory_budget" in _recompute_options(args) and not args.torch_compile,
        "the compiler chooses what to recompute within a memory_budget: set torch_compile=True, or use "
        "every_n_layers or selective",
    ),
    (
        "activation_checkpointing_kwargs",
        lambda args, facts: "memory_budget" in _recompute_options(args) and len(_recompute_options(args)) > 1,
        "the compiler chooses what to recompute within a memory_budget: leave the other options out",
    ),
    (
        "activation_checkpointing_kwargs",
        lambda args, facts: not _is_share(_recompute_options(args).get("memory_budget", 0)),
        "memory_budget must be a number from 0 (recompute all) to 1 (keep what is fastest)",
    ),
    (
        "torch_compile",
        lambda args, facts: bool(args.torch_compile) and _takes_two_backwards(args, facts),
        "an optimizer that updates in the backward needs two backwards of one graph for clipping, nonfinite_policy and "
        "fp16, and a compiled graph frees its buffers in the first: leave these at their defaults, or do not compile",
    ),
    (
        "liger_kernel_config",
        lambda args, facts: bool(args.liger_kernel_config) and not args.use_liger_kernel,
        "has no effect without use_liger_kernel=True; set it, or leave this out",
    ),
    (
        "auto_find_batch_size",
        lambda args, facts: args.auto_find_batch_size and "get_train_dataloader" in facts.overridden,
        "a loader of your own makes its batches itself, so they cannot be made smaller: give a train_dataset",
    ),
    (
        "auto_find_batch_size",
        lambda args, facts: args.auto_find_batch_size and args.dataloader_drop_last,
        "which samples are dropped would depend on the size found: set dataloader_drop_last=False",
    ),
)


def _problems(args: Any, facts: Facts) -> Iterator[Problem]:
    for name, broken, fix in RULES:
        if broken(args, facts):
            value = getattr(args, name, None)
            yield Problem(name, _text(value) if isinstance(value, str) else value, fix)
    for name, instead in NEVER_CALLED.items():
        if name in facts.overridden:
            fix = f"Windlass runs its own loop and would never call it; {instead}"
            yield Problem(name, "overridden", fix)
    yield from batch.objections(args, facts.world.size)


# --- sections of the plan -------------------------------------------------------------------------------------------
# Each is a function of the arguments and facts alone and takes microseconds. Those are public that a method of the
# Trainer needs before there is a plan. What costs more (`resolve_parallel` reads the environment and checks every
# setting) is called once in `resolve`.


def resolve_batch(args: Any, world: World) -> BatchPlan:
    """The batches of a loader, by the arguments alone."""
    size, _ = update_size(args, world.size)
    return BatchPlan(
        size.micro, size.accumulation, world.size, world.rank, args.eval_batch_size_of(world.size)
    )


def resolve_duration(args: Any, facts: Facts) -> DurationPlan:
    """Return updates and epochs: from `max_steps`, else from `num_train_epochs`, whose last pass may be partial.

    If the size of updates changed, the updates made so far and those of the remaining data are added up.
    """
    per_epoch = facts.groups_per_epoch
    # How many more updates were made than the consumed data would make now.
    surplus = 0 if facts.resumed is None else facts.resumed.steps - facts.resumed.amounts_to
    if args.max_steps > 0:
        epochs = math.ceil((args.max_steps - surplus) / per_epoch) if per_epoch else _MAX_STEPS
        return DurationPlan(args.max_steps, epochs, per_epoch)
    assert per_epoch is not None, "a stream without max_steps is refused by the rules"
    made = 0 if facts.resumed is None else facts.resumed.steps
    steps = max(math.ceil(args.num_train_epochs * per_epoch) + surplus, made)
    return DurationPlan(steps, math.ceil(args.num_train_epochs), per_epoch)


def resolve_optimizer(args: Any) -> OptimizerPlan:
    """The optimizer, which a script may make before the number of updates is known."""
    given = args.optim_args
    return OptimizerPlan(
        name=_text(args.optim),
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        epsilon=args.adam_epsilon,
        # `optim_args` is a mapping, or text of `key=value` pairs that was validated before.
        options=dict(given) if isinstance(given, dict) else options_from(given or ""),
        groups=dict(args.optim_groups or {}),
        layer_decay=args.layerwise_lr_decay,
    )


def resolve_schedule(args: Any, total_steps: int) -> SchedulePlan:
    """The schedule of a run of `total_steps` updates."""
    return SchedulePlan(
        _text(args.lr_scheduler_type), _schedule_options(args), args.get_warmup_steps(total_steps)
    )


def _updates_in_backward(args: Any, facts: Facts) -> bool:
    return facts.in_backward or _text(args.optim) in IN_BACKWARD_OPTIMIZERS


def _clipping(args: Any, fused: bool, zero: ZeroPlan | None = None) -> float | None:
    """The norm that gradients are clipped to. Clipping takes a second backward if the optimizer updates in the first
    one, so a `max_grad_norm` that was left at its default does not request it.
    """
    untouched = args.max_grad_norm == OptimisationSection.max_grad_norm and not args.is_given("max_grad_norm")
    return None if fused and untouched else engine_clipping(args, zero) or None


def _takes_two_backwards(args: Any, facts: Facts) -> bool:
    if not _updates_in_backward(args, facts) or update_size(args, facts.world.size)[0].accumulation > 1:
        return False
    return bool(_clipping(args, True) or args.nonfinite_policy != "raise" or args.fp16)


def resolve_parallel(args: Any, world: World) -> Parallel:
    """Resolve how the model is distributed over `world` from the arguments and the launcher of this process. Raises
    ConfigError with every problem, contradictions of the two among them.
    """
    settings = merge(from_arguments(args), from_environment(os.environ))
    found = plan_parallel(settings, world)
    if settings.get(DDP_FIND_UNUSED.name) is not None:
        return found
    # As transformers' Trainer; in a loop of the user's own the default is that of accelerate: no search.
    return replace(found, dist=replace(found.dist, find_unused_parameters=None))


def resolve_engine(args: Any) -> ZeroPlan | None:
    """The configuration of DeepSpeed, for a schedule in it; None without DeepSpeed."""
    settings = merge(from_arguments(args), from_environment(os.environ))
    return plan_parallel(settings, world_from_environment()).dist.zero if uses_deepspeed(settings) else None


def resolve_precision(args: Any) -> PrecisionPlan:
    """The precision of this process without a run: a trainer may only evaluate."""
    return _precision(args, resolve_parallel(args, world_from_environment()))


def _precision(args: Any, parallel: Parallel) -> PrecisionPlan:
    full_eval: Literal["no", "bf16", "fp16"]
    full_eval = "bf16" if args.bf16_full_eval else "fp16" if args.fp16_full_eval else "no"
    return replace(parallel.precision, full_eval=full_eval, tf32=args.tf32)


def resolve_data(args: Any) -> DataPlan:
    """How training data is read."""
    return DataPlan(
        workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
        start_timeout=args.dataloader_start_timeout,
        dispatch=bool(args.accelerator_config.dispatch_batches),
        restart_epoch=bool(args.ignore_data_skip),
        drop_last=args.dataloader_drop_last,
        order=_text(args.train_sampling_strategy),  # type: ignore[arg-type]
        length_column=args.length_column_name,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )


def _save(args: Any, total_steps: int) -> SavePlan:
    return SavePlan(
        output_dir=args.output_dir,
        cadence=resolve_cadence(args.save_strategy, args.save_steps, total_steps),
        total_limit=args.save_total_limit,
        metric=args.metric_for_best_model,
        greater_is_better=bool(args.greater_is_better),
        load_best_at_end=args.load_best_model_at_end,
        every=None if args.save_every is None else seconds(args.save_every),
        background=args.save_in_background,
        host_memory=None if args.save_host_memory is None else size_in_bytes(args.save_host_memory),
        max_failures=args.max_save_failures,
        keep_last=args.keep_last,
        keep_best=args.keep_best,
        model_only=bool(args.save_only_model),
        on_each_node=bool(args.save_on_each_node),
    )


def resolve_preemption(args: Any) -> PreemptionPlan:
    limit = args.preemption_deadline
    return PreemptionPlan(
        signals=tuple(args.preemption_signals.split()),
        deadline=None if limit is None else seconds(limit),
        deadline_text=str(limit),
    )


def resolve_evaluation(args: Any) -> EvaluationPlan:
    """The plan of an evaluation, also of one without training."""
    return EvaluationPlan(
        loss_only=bool(args.prediction_loss_only),
        batch_metrics=bool(args.batch_eval_metrics),
        include=tuple(args.include_for_metrics),
        accumulate_steps=args.eval_accumulation_steps,
        concat=bool(args.eval_do_concat_batches),
        cast="bf16" if args.bf16_full_eval else "fp16" if args.fp16_full_eval else None,
        start_timeout=args.dataloader_start_timeout,
    )


def _transforms(args: Any, parallel: Parallel) -> TransformPlan:
    options = dict(args.activation_checkpointing_kwargs or {})
    budget, compiled = options.pop("memory_budget", None), parallel.compile
    on = bool(args.activation_checkpointing)
    if on and budget is not None and compiled is not None:
        compiled, on = replace(compiled, memory_budget=float(budget)), False  # the compiler recomputes
    return TransformPlan(
        liger=dict(args.liger_kernel_config or {}) if args.use_liger_kernel else None,
        recompute=on,
        recompute_options=options,
        compile=compiled,
        neftune_alpha=args.neftune_noise_alpha,
    )


def resolve_cadence(strategy: Any, steps: float, total: int) -> CadencePlan:
    """Return when something happens in a run of `total` updates; `steps` below 1 is a share of them."""
    stride = math.ceil(total * steps) if 0 < steps < 1 else int(steps)
    return CadencePlan(_text(strategy), max(stride, 1))  # type: ignore[arg-type]


def _schedule_options(args: Any) -> dict[str, Any]:
    options = dict(args.lr_scheduler_kwargs or {})
    if _text(args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy"):
        options.setdefault("mode", "max" if args.greater_is_better else "min")
    return options


def _text(value: Any) -> str:
    """Return the plain string of an enum member or a string."""
    return str(getattr(value, "value", value))
