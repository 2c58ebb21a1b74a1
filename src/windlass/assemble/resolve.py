"""The frozen plan of a call: resolved once from the arguments, the launcher's settings and what a script passed.

`resolve_call` makes what does not depend on the length of the data, which loaders are made from; `resolve_run` adds the
rest for a run, after it has checked the rules.
"""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from typing import Any

from windlass.assemble.batch import resolve_batches
from windlass.assemble.engine_values import engine_clipping, with_engine
from windlass.assemble.rules import MAX_STEPS, Facts, broken_rules, is_share
from windlass.config import accelerator_config
from windlass.config.arguments import TrainingArguments
from windlass.config.enums import IN_BACKWARD_OPTIMIZERS
from windlass.config.kinds import mapping, options_from, seconds, size_in_bytes
from windlass.config.parallel.keys import merge
from windlass.config.parallel.parallel_plan import Parallel, dtype_plans, parallel_problems, plan_parallel
from windlass.config.parallel.rows_training import DDP_FIND_UNUSED
from windlass.config.parallel.sources import from_arguments, from_environment
from windlass.config.plan import (
    CadencePlan,
    CallPlan,
    DataPlan,
    DurationPlan,
    EvaluationPlan,
    OptimizerPlan,
    PreemptionPlan,
    ReportPlan,
    RunPlan,
    SavePlan,
    SchedulePlan,
    StabilityPlan,
    TransformPlan,
    ZeroPlan,
)
from windlass.config.sections.fields import OptimisationSection
from windlass.config.validate import check
from windlass.core.errors import refuse
from windlass.core.mesh import Mesh
from windlass.core.world import World


def resolve_call(args: TrainingArguments, world: World, in_backward: bool = False) -> CallPlan:
    """The plan of a call, as far as it does not depend on the data.

    Args:
        in_backward: the script passed an optimizer that updates in the backward.

    Raises:
        ConfigError: an argument is wrong, or contradicts the launcher's settings.
    """
    check(args)  # scripts may have assigned to arguments
    parallel = resolve_parallel(args, world)
    optimizer = resolve_optimizer(args, in_backward)
    return CallPlan(
        seed=args.seed,
        batches=resolve_batches(args, parallel.dist.mesh(world.size), world.rank),
        optimizer=optimizer,
        schedule=SchedulePlan(_text(args.lr_scheduler_type), _schedule_options(args)),
        precision=replace(parallel.precision, tf32=args.tf32),
        transforms=_transforms(args, parallel),
        stability=StabilityPlan(
            _clipping(args, optimizer.in_backward, parallel.dist.zero),
            args.nonfinite_policy,  # type: ignore[arg-type]
            bool(args.debug),
        ),
        data=_data(args),
        evaluations=_evaluations(args),
        preemption=_preemption(args),
        dist=replace(
            parallel.dist, reduce_each=accelerator_config.read(args.accelerator_config).sync_each_batch
        ),
        reports=ReportPlan(
            tokens=_text(args.include_num_input_tokens_seen),  # type: ignore[arg-type]
            memory=not args.skip_memory_metrics,
            empty_cache_every=args.torch_empty_cache_steps,
            restore_callback_args=bool(args.restore_callback_states_from_checkpoint),
            evaluate_first=bool(args.eval_on_start),
        ),
    )


def resolve_run(args: TrainingArguments, plan: CallPlan, facts: Facts) -> RunPlan:
    """The plan of a training run. Raises ConfigError with every problem found, each naming field, value and fix.

    Args:
        plan: of the call, from the same arguments.
    """
    refuse(broken_rules(args, plan, facts))
    duration, size = resolve_duration(args, facts), facts.size or plan.batches.size
    steps = duration.steps
    whole = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return RunPlan(
        **whole
        | {
            "batch": size,
            "duration": duration,
            "logging": resolve_cadence(args.logging_strategy, args.logging_steps, steps),
            "evaluation": resolve_cadence(args.eval_strategy, args.eval_steps or args.logging_steps, steps),
            "save": _save(args, steps),
            "dist": with_engine(args, plan, size, duration, facts.hidden_size),
        }
    )


def resolve_parallel(args: TrainingArguments, world: World) -> Parallel:
    """Resolve how the model is distributed over `world` from the arguments and the launcher of this process. Raises
    ConfigError with every problem, contradictions of the two among them.
    """
    settings = merge(from_arguments(args), from_environment(os.environ))
    found = plan_parallel(settings, world)
    if settings.get(DDP_FIND_UNUSED.name) is not None:
        return found
    # As transformers' Trainer; in a loop of the user's own the default is that of accelerate: no search.
    return replace(found, dist=replace(found.dist, find_unused_parameters=None))


def resolve_mesh(args: TrainingArguments, world: World) -> Mesh | None:
    """The axes of the processes, as the arguments and the launcher lay them out. None if these have problems, which
    `resolve_call` raises.
    """
    settings = merge(from_arguments(args), from_environment(os.environ))
    problems = parallel_problems(settings, world)
    return None if problems else dtype_plans(settings, world)[1].mesh(world.size)


# --- sections of the plan -------------------------------------------------------------------------------------------


def resolve_duration(args: TrainingArguments, facts: Facts) -> DurationPlan:
    """Return updates and epochs: from `max_steps`, else from `num_train_epochs`, whose last pass may be partial.

    If the size of updates changed, the updates made so far and those of the remaining data are added up.
    """
    per_epoch = facts.groups_per_epoch
    # How many more updates were made than the consumed data would make now.
    surplus = 0 if facts.resumed is None else facts.resumed.steps - facts.resumed.amounts_to
    if args.max_steps > 0:
        epochs = math.ceil((args.max_steps - surplus) / per_epoch) if per_epoch else MAX_STEPS
        return DurationPlan(args.max_steps, args.get_warmup_steps(args.max_steps), epochs, per_epoch)
    assert per_epoch is not None, "a stream without max_steps is refused by the rules"
    # A run whose epochs were shortened below what it has made is complete, and makes no further update.
    made = 0 if facts.resumed is None else facts.resumed.steps
    steps = max(math.ceil(args.num_train_epochs * per_epoch) + surplus, made)
    return DurationPlan(steps, args.get_warmup_steps(steps), math.ceil(args.num_train_epochs), per_epoch)


def resolve_optimizer(args: TrainingArguments, in_backward: bool = False) -> OptimizerPlan:
    """The optimizer that the arguments name; `in_backward`: the script made one that updates in the backward."""
    given, name = args.optim_args, _text(args.optim)
    return OptimizerPlan(
        name=name,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(float(args.adam_beta1), float(args.adam_beta2)),
        epsilon=args.adam_epsilon,
        # `optim_args` is a mapping, or text of `key=value` pairs that was validated before.
        options=dict(given) if isinstance(given, dict) else options_from(given or ""),
        groups=args.group_options(),
        targets=args.optim_target_modules,
        layer_decay=args.layerwise_lr_decay,
        in_backward=in_backward or name in IN_BACKWARD_OPTIMIZERS,
    )


def _clipping(args: TrainingArguments, fused: bool, zero: ZeroPlan | None) -> float | None:
    """The norm that gradients are clipped to. Clipping takes a second backward if the optimizer updates in the first
    one, so a `max_grad_norm` that was left at its default does not request it.
    """
    untouched = args.max_grad_norm == OptimisationSection.max_grad_norm and not args.is_given("max_grad_norm")
    return None if fused and untouched else engine_clipping(args, zero) or None


def _data(args: TrainingArguments) -> DataPlan:
    return DataPlan(
        workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
        start_timeout=args.dataloader_start_timeout,
        dispatch=bool(accelerator_config.read(args.accelerator_config).dispatch_batches),
        restart_epoch=bool(args.ignore_data_skip),
        drop_last=args.dataloader_drop_last,
        order=_text(args.train_sampling_strategy),  # type: ignore[arg-type]
        length_column=args.length_column_name,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )


def _save(args: TrainingArguments, total_steps: int) -> SavePlan:
    return SavePlan(
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


def _preemption(args: TrainingArguments) -> PreemptionPlan:
    limit = args.preemption_deadline
    return PreemptionPlan(
        signals=tuple(args.preemption_signals.split()),
        deadline=None if limit is None else seconds(limit),
        deadline_text=str(limit),
    )


def _evaluations(args: TrainingArguments) -> EvaluationPlan:
    return EvaluationPlan(
        loss_only=bool(args.prediction_loss_only),
        batch_metrics=bool(args.batch_eval_metrics),
        include=tuple(args.include_for_metrics),
        accumulate_steps=args.eval_accumulation_steps,
        concat=bool(args.eval_do_concat_batches),
        cast="bf16" if args.bf16_full_eval else "fp16" if args.fp16_full_eval else None,
        start_timeout=args.dataloader_start_timeout,
    )


def _transforms(args: TrainingArguments, parallel: Parallel) -> TransformPlan:
    options = mapping(args.activation_checkpointing_kwargs)
    budget, compiled = options.pop("memory_budget", None), parallel.compile
    on = bool(args.activation_checkpointing)
    if on and compiled is not None and budget is not None and is_share(budget):
        compiled, on = replace(compiled, memory_budget=float(budget)), False  # the compiler recomputes
    return TransformPlan(
        liger=mapping(args.liger_kernel_config) if args.use_liger_kernel else None,
        qat=args.qat,
        recompute=on,
        recompute_options=options,
        compile=compiled,
        neftune_alpha=args.neftune_noise_alpha,
    )


def resolve_cadence(strategy: Any, steps: float, total: int) -> CadencePlan:
    """Return when something happens in a run of `total` updates; `steps` below 1 is a share of them."""
    stride = math.ceil(total * steps) if 0 < steps < 1 else int(steps)
    return CadencePlan(_text(strategy), max(stride, 1))  # type: ignore[arg-type]


def _schedule_options(args: TrainingArguments) -> dict[str, Any]:
    options = mapping(args.lr_scheduler_kwargs)
    if _text(args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy"):
        options.setdefault("mode", "max" if args.greater_is_better else "min")
    return options


def _text(value: Any) -> str:
    """Return the plain string of an enum member or a string."""
    return str(getattr(value, "value", value))
