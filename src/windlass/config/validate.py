"""Checks of the arguments by themselves, which find all problems at once.

What needs the dataset, the model or the device is checked when a run is resolved.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from windlass.config import accelerator_config
from windlass.config.enums import METRIC_DRIVEN
from windlass.config.normalise import hints, normalise, read_document
from windlass.config.parallel.from_script import FIELDS, from_arguments
from windlass.config.sections.setting import Rules, rules_of
from windlass.config.support_rows import unbuilt_optimizer, unbuilt_trackers
from windlass.config.values import choice_fault, type_fault
from windlass.core.errors import ConfigError, Problem
from windlass.core.redact import is_secret_name

Check = Callable[[Any], Iterator[Problem]]
_RULES: list[tuple[tuple[str, ...], Check]] = []


def check(args: Any) -> None:
    """Normalise `args` in place and raise if anything about them is wrong. To be called again before each run.

    Raises:
        ConfigError: carries every problem.
    """
    found = problems(args)
    if found:
        raise ConfigError(found)


def problems(args: Any) -> list[Problem]:
    """Normalise `args` in place and list all that is wrong; rules that read a wrong value are skipped."""
    normalise(args)
    found = list(_value_problems(args))
    wrong = {problem.field.split(".")[0] for problem in found}
    for reads, rule in _RULES:
        if wrong.isdisjoint(reads):
            found.extend(rule(args))
    return found


def _rule(*reads: str) -> Callable[[Check], Check]:
    """Register a cross-field rule with the fields it reads."""

    def register(check: Check) -> Check:
        _RULES.append((reads, check))
        return check

    return register


def _value_problems(args: Any) -> Iterator[Problem]:
    fields = {f.name: f for f in dataclasses.fields(args)}
    rules = rules_of(type(args))
    for name, hint in hints(type(args)).items():
        value = getattr(args, name)
        fault = _value_fault(name, value, hint, rules[name], fields[name].metadata.get("choices"))
        if fault is not None:
            yield Problem(name, value, fault)


def _value_fault(name: str, value: Any, hint: Any, rules: Rules, choices: Any) -> str | None:
    if rules.document:
        return _document_fault(name, value)
    fault = type_fault(value, hint)
    if fault is not None or value is None:
        return fault
    if rules.bounds is not None and not rules.bounds.holds(value):
        return rules.bounds.words
    try:
        _ = rules.read and rules.read(value)
    except ValueError as error:
        return str(error)
    return choice_fault(value, choices or rules.words) if choices or rules.words else None


def _document_fault(name: str, value: Any) -> str | None:
    """Of a field that holds a dict, and is still text when its JSON could not be read."""
    if name == "accelerator_config" and isinstance(value, accelerator_config.AcceleratorConfig):
        return None
    if isinstance(value, str) and value and name != "deepspeed":
        try:
            read_document(value)
        except ValueError as error:
            return str(error)
    if name == "accelerator_config":
        try:
            accelerator_config.read(value)
        except ConfigError as error:
            return "; ".join(f"{p.field.partition('.')[2] or name}: {p.fix}" for p in error.problems)
    if value is None or isinstance(value, (dict, str)):
        return None
    return f"must be a dict, JSON, or the path of a JSON file, and is {type(value).__name__}"


@_rule("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")
def _one_precision(args: Any) -> Iterator[Problem]:
    for half, brain in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if getattr(args, half) and getattr(args, brain):
            yield Problem(half, True, f"contradicts {brain}=True; choose one of the two")


@_rule("num_train_epochs")
def _some_length(args: Any) -> Iterator[Problem]:
    # A max_steps that is wrong by itself gives no length either, so both are reported at once.
    enough = isinstance(args.max_steps, int) and args.max_steps > 0
    if not enough and args.num_train_epochs <= 0:
        fix = f"gives nothing to train with max_steps={args.max_steps!r}; set one of the two above 0"
        yield Problem("num_train_epochs", args.num_train_epochs, fix)


@_rule("logging_strategy", "eval_strategy", "save_strategy", "logging_steps", "eval_steps", "save_steps")
def _strides(args: Any) -> Iterator[Problem]:
    for kind in ("logging", "eval", "save"):
        if getattr(args, f"{kind}_strategy") == "steps" and not getattr(args, f"{kind}_steps"):
            fix = f"must be above 0 with {kind}_strategy='steps'; use {kind}_strategy='no' to switch it off"
            yield Problem(f"{kind}_steps", getattr(args, f"{kind}_steps"), fix)


@_rule("save_strategy", "metric_for_best_model", "eval_strategy")
def _best_needs_metric(args: Any) -> Iterator[Problem]:
    if args.save_strategy != "best":
        return
    if args.metric_for_best_model is None:
        yield Problem("save_strategy", "best", "needs metric_for_best_model, which says what is best")
    if args.eval_strategy == "no":
        yield Problem(
            "save_strategy", "best", "needs evaluations to compare; set eval_strategy='epoch' or 'steps'"
        )


@_rule("load_best_model_at_end", "eval_strategy", "save_strategy", "save_only_model")
def _best_needs_evaluations(args: Any) -> Iterator[Problem]:
    if not args.load_best_model_at_end:
        return
    if args.eval_strategy == "no":
        yield Problem(
            "load_best_model_at_end", True, "needs evaluations; set eval_strategy='epoch' or 'steps'"
        )
    if args.save_strategy == "no":
        yield Problem(
            "load_best_model_at_end", True, "needs checkpoints; set save_strategy to other than 'no'"
        )


@_rule("lr_scheduler_type", "eval_strategy")
def _metric_schedule(args: Any) -> Iterator[Problem]:
    if args.lr_scheduler_type in METRIC_DRIVEN and args.eval_strategy == "no":
        fix = "follows an evaluated metric; set eval_strategy='epoch' or 'steps'"
        yield Problem("lr_scheduler_type", str(args.lr_scheduler_type), fix)


@_rule("dataloader_num_workers")
def _workers(args: Any) -> Iterator[Problem]:
    if args.dataloader_num_workers > 0:
        return
    for name in (
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
        "dataloader_multiprocessing_context",
    ):
        if getattr(args, name):
            yield Problem(
                name, getattr(args, name), "needs loader processes; set dataloader_num_workers above 0"
            )


@_rule("average_tokens_across_devices")
def _one_denominator(args: Any) -> Iterator[Problem]:
    if not args.average_tokens_across_devices:
        fix = "is not built: the loss is always normalised by the targets of all processes, so it equals one process's"
        yield Problem("average_tokens_across_devices", False, fix)


@_rule("nonfinite_policy")
def _nonfinite(args: Any) -> Iterator[Problem]:
    saves_none = args.save_strategy == "no" and args.save_every is None
    if args.nonfinite_policy == "rollback" and (saves_none or args.save_only_model):
        fix = "there would be no checkpoint to go back to; set a save_strategy, and save_only_model=False"
        yield Problem("nonfinite_policy", "rollback", fix)


@_rule("preemption_signals")
def _signals(args: Any) -> Iterator[Problem]:
    words = str(args.preemption_signals).split()
    wrong = [word for word in words if not (word.startswith("SIG") and hasattr(signal, word))]
    refused = [word for word in words if word in ("SIGKILL", "SIGSTOP", "SIGINT")]
    if (wrong and words != ["none"]) or refused or not words:
        fix = (
            "give names of signals with spaces between them, such as 'SIGTERM SIGUSR1', or 'none'; Ctrl-C (SIGINT) "
            "always saves, and SIGKILL and SIGSTOP cannot be taken"
        )
        yield Problem("preemption_signals", args.preemption_signals, fix)


@_rule("save_total_limit", "keep_last", "keep_best", "eval_strategy", "save_strategy")
def _retention(args: Any) -> Iterator[Problem]:
    for name in ("keep_last", "keep_best"):
        if getattr(args, name) is not None and args.save_total_limit is not None:
            fix = (
                "keep_last and keep_best say how many stay of each kind: leave out save_total_limit, or these"
            )
            yield Problem(name, getattr(args, name), fix)
    for name in ("eval_strategy", "save_strategy"):
        if args.keep_best is not None and getattr(args, name) == "no":
            fix = f"it keeps what evaluations find best: set {name} to 'steps' or 'epoch', or leave it out"
            yield Problem("keep_best", args.keep_best, fix)


@_rule("save_every", "save_only_model")
def _saves_for_resuming(args: Any) -> Iterator[Problem]:
    if args.save_every is not None and args.save_only_model:
        fix = "is for resuming a run that was cut off, which needs more than the model; set save_only_model=False"
        yield Problem("save_every", args.save_every, fix)


@_rule("optim", "report_to")
def _unbuilt_words(args: Any) -> Iterator[Problem]:
    """Words of honoured fields whose feature is not built."""
    reason = unbuilt_optimizer(str(args.optim))
    if reason is not None:
        yield Problem("optim", str(args.optim), reason)
    for tracker, why in unbuilt_trackers(args.report_to):
        yield Problem("report_to", tracker, why)


@_rule()
def _unbuilt_fields(args: Any) -> Iterator[Problem]:
    fields = {field.name: field for field in dataclasses.fields(args)}
    for name, rules in rules_of(type(args)).items():
        if rules.refused and not _is_neutral(fields[name], getattr(args, name)):
            value = "***" if is_secret_name(name) else getattr(args, name)
            yield Problem(
                name, value, rules.refused if ";" in rules.refused else f"{rules.refused}; leave it out"
            )


def _is_neutral(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return True if `value` requests nothing: the default, or an empty value if the default is empty."""
    if not field.default and (value in (None, False, "", 0) or value == [] or value == {}):
        return True
    return bool(value == field.default)


@_rule(*FIELDS)
def _spread(args: Any) -> Iterator[Problem]:
    for problem in from_arguments(args).problems:
        yield dataclasses.replace(problem, field=problem.field.removeprefix("TrainingArguments."))


@_rule("accelerator_config", "gradient_accumulation_steps")
def _accelerator(args: Any) -> Iterator[Problem]:
    yield from accelerator_config.objections(args.accelerator_config, args.gradient_accumulation_steps)


@_rule("activation_checkpointing_kwargs")
def _recompute_options(args: Any) -> Iterator[Problem]:
    options = args.activation_checkpointing_kwargs or {}
    every = options.get("every_n_layers", 1)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        fix = "must be a whole number of at least 1"
        yield Problem("activation_checkpointing_kwargs.every_n_layers", every, fix)


@_rule("local_rank")
def _launcher_agrees(args: Any) -> Iterator[Problem]:
    said = os.environ.get("LOCAL_RANK")
    if args.local_rank > 0 and said != str(args.local_rank):
        fix = f"disagrees with the environment (LOCAL_RANK={said}); leave it out, and start the script with torchrun"
        yield Problem("local_rank", args.local_rank, fix)
