"""The rules that need the data or the process, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.assemble.batch import objections
from windlass.config.arguments import TrainingArguments
from windlass.config.kinds import mapping
from windlass.config.plan import CallPlan, UpdateSize
from windlass.core.errors import Problem


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a resumed run whose updates have another size than before."""

    steps: int  # updates made so far
    amounts_to: int  # updates of the current size that the consumed data would make


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Trainer measures before `resolve_run` checks it."""

    # Updates in one pass over the training data; None for a stream of unknown length
    groups_per_epoch: int | None
    has_training_data: bool = True  # there is a training dataset, or an overridden loader
    has_evaluation_data: bool = True  # there is an evaluation dataset, or an overridden loader
    evaluates_iterator: bool = False  # an evaluation set can be read once only
    overridden: frozenset[str] = frozenset()  # names of Trainer methods that the subclass overrides
    # Methods that the script overrides and no run calls, with what to do instead
    uncalled: Mapping[str, str] = field(default_factory=dict)
    # Methods of other trainers that an override calls, and that Trainer does not have
    absent: frozenset[str] = frozenset()
    resumed: Progress | None = None  # the progress before updates changed their size; None if they did not
    size: UpdateSize | None = None  # the size of updates; None: that of the arguments
    hidden_size: int | None = None  # width of the model, as its configuration has it; None if it has none


MAX_STEPS = 10**9

Condition = Callable[[TrainingArguments, CallPlan, Facts], Any]
_LOST_WEIGHTS = (
    "it casts the trained weights; set eval_strategy='no' and evaluate afterwards, or use bf16=True"
)
_OF_STAGES = (
    "weights that are divided among the stages of a pipeline are not cast: evaluate with bf16=True, or load what was "
    "saved in one process"
)
# (option, the rule is broken if, fix): `name` is the option of each row.
RULES: tuple[tuple[str, Condition, str], ...] = (
    (
        "train_dataset",
        lambda args, plan, facts: not facts.has_training_data,
        "training needs one: pass `train_dataset=` or override `get_train_dataloader`",
    ),
    (
        "eval_strategy",
        lambda args, plan, facts: not facts.has_evaluation_data and args.eval_strategy != "no",
        "pass `eval_dataset=`, or set eval_strategy='no'",
    ),
    (
        "eval_strategy",
        lambda args, plan, facts: facts.evaluates_iterator and args.eval_strategy != "no",
        "a run evaluates several times, and its first evaluation reads a generator to the end: pass a list as "
        "`eval_dataset=`, or an object whose __iter__ begins again",
    ),
    (
        "save_strategy",
        lambda args, plan, facts: not facts.has_evaluation_data and args.save_strategy == "best",
        "pass `eval_dataset=`: the best checkpoint is found by evaluating",
    ),
    (
        "average_tokens_across_devices",
        lambda args, plan, facts: not args.average_tokens_across_devices and plan.batches.ranks > 1,
        "is not built: the loss is always normalised by the targets of all processes, so it equals one process's",
    ),
    (
        "max_steps",
        lambda args, plan, facts: facts.groups_per_epoch is None and args.max_steps <= 0,
        "the training data is a stream without a length: set max_steps to the number of updates to make",
    ),
    (
        "max_steps",
        lambda args, plan, facts: args.max_steps > MAX_STEPS,
        f"a run makes at most {MAX_STEPS:,} updates; is a unit wrong?",
    ),
    (
        "num_train_epochs",
        lambda args, plan, facts: (
            args.max_steps <= 0 and args.num_train_epochs * (facts.groups_per_epoch or 0) > MAX_STEPS
        ),
        f"with this data that is more than {MAX_STEPS:,} updates; is a unit wrong?",
    ),
    (
        "bf16_full_eval",
        lambda args, plan, facts: args.bf16_full_eval and args.eval_strategy != "no",
        _LOST_WEIGHTS,
    ),
    (
        "fp16_full_eval",
        lambda args, plan, facts: args.fp16_full_eval and args.eval_strategy != "no",
        _LOST_WEIGHTS,
    ),
    (
        "bf16_full_eval",
        lambda args, plan, facts: args.bf16_full_eval and plan.dist.pipeline is not None,
        _OF_STAGES,
    ),
    (
        "fp16_full_eval",
        lambda args, plan, facts: args.fp16_full_eval and plan.dist.pipeline is not None,
        _OF_STAGES,
    ),
    (
        "ddp_find_unused_parameters",
        lambda args, plan, facts: args.ddp_find_unused_parameters and args.ddp_static_graph,
        "a static graph uses the same parameters in every step: leave one of the two out",
    ),
    (
        "activation_checkpointing_kwargs",
        lambda args, plan, facts: (
            plan.optimizer.in_backward and bool(_recompute_options(args).get("use_reentrant"))
        ),
        "a reentrant checkpoint accumulates gradients block by block, and the optimizer updates when the first part "
        "arrives: leave use_reentrant out",
    ),
    (
        "activation_checkpointing_kwargs",
        lambda args, plan, facts: "memory_budget" in _recompute_options(args) and not args.torch_compile,
        "the compiler chooses what to recompute within a memory_budget: set torch_compile=True, or use "
        "every_n_layers or selective",
    ),
    (
        "activation_checkpointing_kwargs",
        lambda args, plan, facts: (
            "memory_budget" in _recompute_options(args) and len(_recompute_options(args)) > 1
        ),
        "the compiler chooses what to recompute within a memory_budget: leave the other options out",
    ),
    (
        "activation_checkpointing_kwargs",
        lambda args, plan, facts: not is_share(_recompute_options(args).get("memory_budget", 0)),
        "memory_budget must be a number from 0 (recompute all) to 1 (keep what is fastest)",
    ),
    (
        "torch_compile",
        lambda args, plan, facts: bool(args.torch_compile) and _takes_two_backwards(args, plan),
        "an optimizer that updates in the backward needs two backwards of one graph for clipping, nonfinite_policy and "
        "fp16, and a compiled graph frees its buffers in the first: leave these at their defaults, or do not compile",
    ),
    (
        "neftune_noise_alpha",
        lambda args, plan, facts: args.neftune_noise_alpha and plan.dist.context * plan.dist.sequence > 1,
        "it is scaled by the length of a row, of which each process has a part: leave it out, or set cp_size and "
        "sp_size to 1",
    ),
    (
        "liger_kernel_config",
        lambda args, plan, facts: bool(args.liger_kernel_config) and not args.use_liger_kernel,
        "has no effect without use_liger_kernel=True; set it, or leave this out",
    ),
    (
        "qat",
        lambda args, plan, facts: args.qat and plan.dist.tensor * plan.dist.expert > 1,
        "a layer whose weights are divided among ranks would have a scale for each part, which no export has: set "
        "tp_size and ep_size to 1, and use fsdp",
    ),
    (
        "qat",
        lambda args, plan, facts: args.qat and (plan.dist.zero or plan.dist.pipeline),
        "is built for one process, DDP and FSDP2: leave out deepspeed and pp_size, or qat",
    ),
    (
        "qat",
        lambda args, plan, facts: args.qat and plan.precision.float8,
        "rounds the weights that fp8 would multiply in float8: use one of the two",
    ),
    (
        "auto_find_batch_size",
        lambda args, plan, facts: args.auto_find_batch_size and "get_train_dataloader" in facts.overridden,
        "a loader of your own makes its batches itself, so they cannot be made smaller: give a train_dataset",
    ),
    (
        "auto_find_batch_size",
        lambda args, plan, facts: args.auto_find_batch_size and args.dataloader_drop_last,
        "which samples are dropped would depend on the size found: set dataloader_drop_last=False",
    ),
)


def broken_rules(args: TrainingArguments, plan: CallPlan, facts: Facts) -> Iterator[Problem]:
    """What keeps a run from starting with this plan."""
    for name, broken, fix in RULES:
        if broken(args, plan, facts):
            value = getattr(args, name, None)
            yield Problem(name, getattr(value, "value", value), fix)
    for name, instead in facts.uncalled.items():
        yield Problem(name, "overridden", f"Windlass runs its own loop and would never call it; {instead}")
    if facts.absent:
        fix = (
            f"it calls {', '.join(sorted(facts.absent))}, which Windlass does not have: a checkpoint is written as a "
            "whole. Call super()._save_checkpoint(model, trial), and write what is yours beside it"
        )
        yield Problem("_save_checkpoint", "overridden", fix)
    yield from objections(args, plan.batches.ranks)


def is_share(value: Any) -> bool:
    """Return True for a number from 0 to 1."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _recompute_options(args: TrainingArguments) -> dict[str, Any]:
    return mapping(args.activation_checkpointing_kwargs)


def _takes_two_backwards(args: TrainingArguments, plan: CallPlan) -> bool:
    if not plan.optimizer.in_backward or plan.batches.accumulation > 1:
        return False
    guarded = plan.stability.max_grad_norm or plan.stability.nonfinite != "raise"
    return bool(guarded or args.fp16)
