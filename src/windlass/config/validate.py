"""The arguments by themselves: their values in one form, and checks that find all problems at once.

What needs the dataset, the model or the device is checked when a run is resolved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from windlass.config import accelerator_config
from windlass.config.accepting import TWINS
from windlass.config.enums import (
    METRIC_DRIVEN,
    PROJECTING_OPTIMIZERS,
    UNBUILT_OPTIMIZERS,
    DebugOption,
    unbuilt_trackers,
)
from windlass.config.kinds import as_declared, document, mapping
from windlass.config.parallel.sources import FIELDS, from_arguments
from windlass.config.parallel.xla_checks import absent_xla
from windlass.config.sections.fields import Fields
from windlass.config.sections.setting import rules_of
from windlass.config.values import alternatives, wrong_values
from windlass.core import xla
from windlass.core.errors import Problem, refuse
from windlass.core.locations import is_url
from windlass.core.logs import script_verbosity

Check = Callable[[Any], Iterator[Problem]]
# Stands for any value of a `Conflict` that is set and not 0.
SET: Any = object()


class Conflict:
    """Values that options cannot have together.

    Args:
        fix: end of the sentence "OPTION ...", about the first of `values`; `{args.NAME}` is replaced by another option.
        values: option -> the value, a tuple of values, or `SET`.
    """

    def __init__(self, fix: str, **values: Any) -> None:
        self.values, self._fix = values, fix

    def problems(self, args: Fields) -> Iterator[Problem]:
        if all(_matches(getattr(args, name), wanted) for name, wanted in self.values.items()):
            name = next(iter(self.values))
            value = getattr(args, name)
            yield Problem(
                name, value.value if isinstance(value, Enum) else value, self._fix.format(args=args)
            )


def _matches(value: Any, wanted: Any) -> bool:
    if wanted is SET:
        return bool(value)
    return bool(value in wanted if isinstance(wanted, tuple) else value == wanted)


def check(args: Fields) -> None:
    """Normalise `args` in place and raise if anything is wrong. To be called again before each run. Raises ConfigError
    with every problem.
    """
    refuse(problems(args))


def problems(args: Fields) -> list[Problem]:
    """Normalise `args` in place and list all that is wrong. What reads a wrong value is not checked further."""
    normalise(args)
    cls: Any = type(args)
    found = list(wrong_values(args, rules_of(cls)))
    wrong = {problem.field for problem in found}
    for conflict in _CONFLICTS:
        if wrong.isdisjoint(conflict.values):
            found += conflict.problems(args)
    for reads, rule in _RULES:
        if wrong.isdisjoint(reads):
            found += rule(args)
    return found


# --- one form of each value -------------------------------------------------------------------------------------------


def normalise(args: Fields) -> None:
    """Normalise `args`. May be called again after any assignment, and then derives values again."""
    values = args.__dict__
    values |= values.get("_derived", {})
    values["_derived"] = {}
    cls: Any = type(args)
    for name, kinds in alternatives(cls).items():
        values[name] = as_declared(values[name], kinds)
    forms = {name: rule.form for name, rule in rules_of(cls).items() if rule.form}
    # Fields of a script's subclass; their text is taken for JSON only if it looks so.
    for name in getattr(cls, "_VALID_DICT_FIELDS", ()):
        if name not in forms and str(values.get(name)).startswith("{"):
            forms[name] = document
    for name, form in forms.items():
        with contextlib.suppress(ValueError):  # the check gives the reason
            values[name] = form(values[name])
    for old, new in TWINS.items():
        if values[new] is None:
            values[new] = values[old]
        values[old] = values[new]
    if values["activation_checkpointing"] is None:
        values["activation_checkpointing"] = values["gradient_checkpointing"] = False
    _derive(args)


def _derive(args: Fields) -> None:
    """Set fields that follow from others, and keep their given values so that they can be derived again."""
    values = args.__dict__

    def follow(name: str, value: Any) -> None:
        if values[name] != value:
            values["_derived"][name] = values[name]
            values[name] = value

    if values["eval_strategy"] == "steps" and not values["eval_steps"]:
        follow("eval_steps", values["logging_steps"])
    if values["eval_strategy"] != "no" and values["do_eval"] is False:
        follow("do_eval", True)
    wants_metric = (
        values["load_best_model_at_end"]
        or values["keep_best"] is not None
        or values["lr_scheduler_type"] in METRIC_DRIVEN
    )
    if values["metric_for_best_model"] is None and wants_metric:
        follow("metric_for_best_model", "loss")
    if values["greater_is_better"] is None and isinstance(values["metric_for_best_model"], str):
        follow("greater_is_better", not values["metric_for_best_model"].endswith("loss"))
    if values["disable_tqdm"] is None:
        follow("disable_tqdm", script_verbosity() > logging.WARNING)
    if values["use_cpu"] is True:
        follow("dataloader_pin_memory", False)
    _derive_compile(values, follow)
    config = values["accelerator_config"]
    if (
        isinstance(config, accelerator_config.AcceleratorConfig)
        and values["gradient_accumulation_steps"] == 1
    ):
        follow("gradient_accumulation_steps", config.num_steps or 1)


def _derive_compile(values: dict[str, Any], follow: Any) -> None:
    if (
        values["torch_compile_backend"] is not None
        or values["torch_compile_mode"] is not None
        or values["torch_compile_blocks"] is True
    ):
        follow("torch_compile", True)
    if values["torch_compile"] is True and values["torch_compile_backend"] is None:
        follow("torch_compile_backend", "inductor")


# --- several options -------------------------------------------------------------------------------------------------

_NEEDS_EVALUATIONS = "needs evaluations; set eval_strategy='epoch' or 'steps'"
_NEEDS_WORKERS = "needs worker processes; set dataloader_num_workers above 0"
_NEEDS_CHECKPOINTS = "needs checkpoints to roll back to; set a save_strategy, and save_only_model=False"
_TWO_LIMITS = "keep_last and keep_best limit each kind: leave out save_total_limit, or these"
_NEEDS_RANKING = "it keeps the best of the evaluations: set {} to 'steps' or 'epoch', or leave it out"
_CONFLICTS = (
    Conflict("contradicts bf16=True; choose one of the two", fp16=True, bf16=True),
    Conflict(
        "contradicts bf16=True; leave that out, for all but linear layers is in bfloat16", fp8=True, bf16=True
    ),
    Conflict("contradicts fp16=True; choose one of the two", fp8=True, fp16=True),
    Conflict(
        "contradicts bf16_full_eval=True; choose one of the two", fp16_full_eval=True, bf16_full_eval=True
    ),
    *(
        Conflict(
            f"must be above 0 with {kind}_strategy='steps'; use {kind}_strategy='no' to disable it",
            **{f"{kind}_steps": (0, -1, None), f"{kind}_strategy": "steps"},
        )
        for kind in ("logging", "eval", "save")
    ),
    Conflict(
        "needs metric_for_best_model, which decides what is best",
        save_strategy="best",
        metric_for_best_model=None,
    ),
    Conflict(_NEEDS_EVALUATIONS, save_strategy="best", eval_strategy="no"),
    Conflict(_NEEDS_EVALUATIONS, load_best_model_at_end=True, eval_strategy="no"),
    Conflict(
        "needs checkpoints; set save_strategy to other than 'no'",
        load_best_model_at_end=True,
        save_strategy="no",
    ),
    Conflict(
        "follows an evaluated metric; set eval_strategy='epoch' or 'steps'",
        lr_scheduler_type=METRIC_DRIVEN,
        eval_strategy="no",
    ),
    Conflict(_NEEDS_WORKERS, dataloader_prefetch_factor=SET, dataloader_num_workers=0),
    Conflict(_NEEDS_WORKERS, dataloader_persistent_workers=True, dataloader_num_workers=0),
    Conflict(_NEEDS_WORKERS, dataloader_multiprocessing_context=SET, dataloader_num_workers=0),
    Conflict(_NEEDS_CHECKPOINTS, nonfinite_policy="rollback", save_strategy="no", save_every=None),
    Conflict(_NEEDS_CHECKPOINTS, nonfinite_policy="rollback", save_only_model=True),
    Conflict(_TWO_LIMITS, keep_last=SET, save_total_limit=SET),
    Conflict(_TWO_LIMITS, keep_best=SET, save_total_limit=SET),
    Conflict(_NEEDS_RANKING.format("eval_strategy"), keep_best=SET, eval_strategy="no"),
    Conflict(_NEEDS_RANKING.format("save_strategy"), keep_best=SET, save_strategy="no"),
    Conflict(
        "is for resuming an interrupted run, which needs more than the model; set save_only_model=False",
        save_every=SET,
        save_only_model=True,
    ),
)
_RULES: list[tuple[tuple[str, ...], Check]] = []


def _rule(*reads: str) -> Callable[[Check], Check]:
    """Register a rule with the fields it reads."""

    def register(check: Check) -> Check:
        _RULES.append((reads, check))
        return check

    return register


@_rule("push_to_hub", "output_dir")
def _publishes_from_a_disk(args: Fields) -> Iterator[Problem]:
    if args.push_to_hub and is_url(str(args.output_dir)):
        fix = "uploads from a folder of this machine: set output_dir to one, or use `windlass checkpoint push` later"
        yield Problem("push_to_hub", True, fix)


@_rule("num_train_epochs")
def _some_length(args: Fields) -> Iterator[Problem]:
    # A max_steps that is wrong by itself does not set a length either, so both are reported at once.
    enough = isinstance(args.max_steps, int) and args.max_steps > 0
    if not enough and args.num_train_epochs <= 0:
        fix = f"leaves nothing to train with max_steps={args.max_steps!r}; set one of the two above 0"
        yield Problem("num_train_epochs", args.num_train_epochs, fix)


@_rule("preemption_signals")
def _signals(args: Fields) -> Iterator[Problem]:
    words = str(args.preemption_signals).split()
    # `signal` also has numbers that are no signals, such as SIG_IGN.
    known = [word for word in words if isinstance(getattr(signal, word, None), signal.Signals)]
    refused = {"SIGKILL", "SIGSTOP", "SIGINT"}.intersection(words)
    if (known != words and words != ["none"]) or refused or not words:
        fix = (
            "give names of signals with spaces between them, such as 'SIGTERM SIGUSR1', or 'none'; Ctrl-C (SIGINT) "
            "always saves, and SIGKILL and SIGSTOP cannot be handled"
        )
        yield Problem("preemption_signals", args.preemption_signals, fix)


@_rule("optim_groups")
def _groups(args: Fields) -> Iterator[Problem]:
    for pattern, options in mapping(args.optim_groups).items():
        field = f"optim_groups[{pattern!r}]"
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            yield Problem("optim_groups", pattern, f"is not a regular expression: {error}")
        if not isinstance(options, Mapping) or not options:
            yield Problem(
                field, options, "must be a dict of options, such as {'lr': 1e-4, 'weight_decay': 0.0}"
            )
            continue
        for key, value in options.items():
            if fix := _wrong_option(key, value):
                yield Problem(f"{field}.{key}", as_declared(value, (float,)), fix)


def _wrong_option(key: str, value: Any) -> str:
    """What is wrong with an option of a group, in whichever optimizer has it; empty if nothing is."""
    several = isinstance(value, list | tuple)
    numbers = [as_declared(part, (float,)) for part in (value if several else [value])]
    if key == "eps" and several:  # of Adafactor, in torch with None among them
        numbers = [number for number in numbers if number is not None]
    real = all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < math.inf for n in numbers)
    if key == "betas" and not (several and real and all(number < 1 for number in numbers)):
        return "must be numbers of at least 0 and below 1, such as [0.9, 0.95]"
    if key in ("lr", "weight_decay", "eps", "momentum") and not (real and (key == "eps" or not several)):
        return "must be a number of at least 0"
    return ""


@_rule("optim", "report_to")
def _unbuilt_words(args: Fields) -> Iterator[Problem]:
    """Words of honoured fields whose feature is not built."""
    if reason := UNBUILT_OPTIMIZERS.get(str(args.optim)):
        yield Problem("optim", str(args.optim), reason)
    elif str(args.optim) == "adamw_torch_xla" and not xla.is_selected():
        yield Problem("optim", str(args.optim), f"{xla.NEEDED}; elsewhere use adamw_torch")
    for tracker, why in unbuilt_trackers(list(args.report_to or ())):
        yield Problem("report_to", tracker, why)


@_rule("debug")
def _debugging_aids(args: Fields) -> Iterator[Problem]:
    if DebugOption.TPU_METRICS_DEBUG in args.debug:
        fix = "print torch_xla.debug.metrics.metrics_report() in a callback's on_evaluate, and leave it out"
        yield Problem("debug", str(DebugOption.TPU_METRICS_DEBUG), fix)


@_rule("optim", "optim_target_modules")
def _projection(args: Fields) -> Iterator[Problem]:
    projects, targets = str(args.optim) in PROJECTING_OPTIMIZERS, args.optim_target_modules
    if projects and not targets:
        fix = f"{args.optim} needs the linear layers to project: parts of their names, or 'all-linear'"
        yield Problem("optim_target_modules", targets, fix)
    elif targets and not projects:
        fix = f"needs an optimizer that projects gradients: optim={' or '.join(PROJECTING_OPTIMIZERS)}"
        yield Problem("optim_target_modules", targets, fix)


@_rule(*FIELDS)
def _distribution(args: Fields) -> Iterator[Problem]:
    settings = from_arguments(args)
    for problem in (*settings.problems, *absent_xla(settings)):
        yield dataclasses.replace(problem, field=problem.field.removeprefix("TrainingArguments."))


@_rule("accelerator_config", "gradient_accumulation_steps")
def _accelerator(args: Fields) -> Iterator[Problem]:
    config = accelerator_config.read(args.accelerator_config)
    yield from config.objections(args.gradient_accumulation_steps)


@_rule("activation_checkpointing_kwargs")
def _recompute_options(args: Fields) -> Iterator[Problem]:
    every = mapping(args.activation_checkpointing_kwargs).get("every_n_layers", 1)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        fix = "must be a whole number of at least 1"
        yield Problem("activation_checkpointing_kwargs.every_n_layers", every, fix)


@_rule("local_rank")
def _launcher_agrees(args: Fields) -> Iterator[Problem]:
    of_launcher = os.environ.get("LOCAL_RANK")
    if args.local_rank > 0 and of_launcher != str(args.local_rank):
        fix = f"disagrees with the environment (LOCAL_RANK={of_launcher}); leave it out, and start with torchrun"
        yield Problem("local_rank", args.local_rank, fix)
