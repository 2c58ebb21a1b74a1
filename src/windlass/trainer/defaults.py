"""Defaults of a Trainer, and checks of its constructor's arguments, as plain functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.callbacks.alerts import read_rules
from windlass.callbacks.flow import DefaultFlowCallback
from windlass.callbacks.metrics_log import MetricsLogCallback
from windlass.callbacks.progress import NotebookProgressCallback, PrinterCallback, ProgressCallback
from windlass.callbacks.report import ReportCallback
from windlass.callbacks.samples_log import SamplesLog
from windlass.callbacks.tracking import TrackingCallback
from windlass.checkpoint.remote import RemoteFolder
from windlass.checkpoint.retention import Retention
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import TrainerCallback
from windlass.config.enums import REPORT
from windlass.config.plan import SavePlan, ZeroPlan
from windlass.core.device import visible_devices
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.lazy import LazyModule
from windlass.core.locations import is_url
from windlass.core.logs import get_job_logger
from windlass.core.output import in_notebook
from windlass.core.redact import has_hidden
from windlass.core.rng import enable_full_determinism, set_seed
from windlass.core.world import World
from windlass.data.collate_pad import DataCollatorWithPadding, auto_collate
from windlass.transforms.first_rank import has_weights
from windlass.transforms.placing import to_device
from windlass.transforms.quantization_aware import apply_qat as apply_qat

DEFAULT_CALLBACKS: list[type[TrainerCallback]] = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK: type[TrainerCallback] = (
    NotebookProgressCallback if in_notebook() else ProgressCallback
)
# Imported if a run publishes.
publishing: Any = LazyModule("windlass.trainer.publishing")

logger = get_job_logger(__name__)
OWN_ACCELERATOR = (
    "the Trainer makes its accelerator itself, by the arguments: set accelerator_config, ddp_timeout, ddp_backend, "
    "fsdp or deepspeed there; a create_accelerator_and_postprocess may only add to self.accelerator"
)


def checked_arguments(args: object) -> TrainingArguments:
    """Return the arguments, by default `TrainingArguments()`; raise ConfigError if they are of another type."""
    if args is None:
        return TrainingArguments()
    if isinstance(args, TrainingArguments):
        return args
    kind = f"{type(args).__module__}.{type(args).__qualname__}"
    fix = "give windlass.TrainingArguments(...); a dict of options goes in as TrainingArguments(**options)"
    raise ConfigError(Problem("args", kind, fix))


def seed_all(args: TrainingArguments) -> None:
    """Seed all random generators by the arguments."""
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)


def first_model(model: Any, make: Callable[[], nn.Module] | None) -> nn.Module:
    """Return the model, or make it with `make`, which calls `model_init`; raise ConfigError unless one is given."""
    if (model is None) == (make is None):
        fix = "give exactly one of `model` and `model_init`"
        raise ConfigError(Problem("model", None if model is None else type(model).__name__, fix))
    model = model if make is None else make()
    if not isinstance(model, nn.Module):
        name = model if isinstance(model, str) else "NAME"
        fix = f"give an nn.Module; load a name first, as with AutoModelForCausalLM.from_pretrained({name!r})"
        if isinstance(model, type):
            fix = f"is the class; give an instance of it: {model.__name__}()"
        raise ConfigError(Problem("model", name if isinstance(model, str) else type(model).__name__, fix))
    return model


# Method that a script may override -> the sections of a DeepSpeed configuration that represent what it makes.
MAKERS = {
    "create_optimizer": ("optimizer",),
    "create_scheduler": ("scheduler",),
    "create_optimizer_and_scheduler": ("optimizer", "scheduler"),
}


def check_given(
    args: TrainingArguments,
    zero: ZeroPlan | None,
    optimizers: tuple[Any, Any],
    cls_and_kwargs: Any,
    model_init: Any,
    makers: Collection[str],
) -> None:
    """Raise ConfigError for an output folder that cannot be opened, and for contradictions to a script's optimizer.
    `makers` are the `MAKERS` that the script overrides.
    """
    problems, given = _remote_problems(str(args.output_dir)), optimizers[0] is not None
    if cls_and_kwargs is not None and not _is_class_with_options(cls_and_kwargs):
        fix = "give a pair, of an optimizer's class and its options: (torch.optim.SGD, {'lr': 0.1})"
        raise ConfigError(Problem("optimizer_cls_and_kwargs", cls_and_kwargs, fix))
    problems += _engine_problems(zero, optimizers, cls_and_kwargs, makers)
    if given and cls_and_kwargs is not None:
        problems.append(Problem("optimizers", "given", "leave out either it or optimizer_cls_and_kwargs"))
    if model_init is not None and (given or optimizers[1] is not None):
        fix = "model_init makes a new model at each train(), unknown to this optimizer; override create_optimizer"
        problems.append(Problem("optimizers", "given", fix))
    refuse(problems)


def _is_class_with_options(given: Any) -> bool:
    return isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], Mapping)


def _engine_problems(
    zero: ZeroPlan | None, optimizers: tuple[Any, Any], cls_and_kwargs: Any, makers: Collection[str]
) -> list[Problem]:
    """Objects and overrides of the script beside sections of a DeepSpeed configuration that represent the same."""
    optimizer, schedule = optimizers
    objects = [
        ("optimizer", "optimizers[0]", optimizer),
        ("optimizer", "optimizer_cls_and_kwargs", cls_and_kwargs and cls_and_kwargs[0]),
        ("scheduler", "optimizers[1]", schedule),
    ]
    given = [
        (section, f"{source}={getattr(found, '__name__', type(found).__name__)} of the Trainer")
        for section, source, found in objects
        if found is not None
    ]
    given += [(section, f"the overridden {name}") for name in sorted(makers) for section in MAKERS[name]]
    return [
        Problem(
            f"{zero.origin}.{section}.type",
            zero.config[section].get("type"),
            f"contradicts {source}: leave out one of the two",
        )
        for section, source in given
        if zero is not None and section in zero.config
    ]


def _remote_problems(output_dir: str) -> list[Problem]:
    """Reasons why a URL cannot be opened: an unknown kind of folder, or a package that is not installed."""
    if not is_url(output_dir):
        return []
    if has_hidden(output_dir):
        fix = "its credentials were removed when the arguments were written; give the whole URL again"
        return [Problem("output_dir", output_dir, fix)]
    try:
        RemoteFolder(output_dir)
    except ConfigError as error:
        return error.problems
    return []


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Return True if `model_init` takes the trial of a search, instead of nothing."""
    return any(
        p.name == "trial" or (p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        for p in inspect.signature(model_init).parameters.values()
    )


def default_callbacks(args: TrainingArguments, folder: Path) -> list[Any]:
    """The callbacks that are called before a script's own."""
    names = [name for name in args.report_to or () if name != REPORT]
    trackers = [TrackingCallback(names)] if names else []
    report = [ReportCallback] if REPORT in (args.report_to or ()) else []
    hub = [publishing.hub_callback(args, folder)] if args.push_to_hub else []
    return [
        # First, so that a script's callback may take back a flag that they set.
        *_assigned("DEFAULT_CALLBACKS"),
        MetricsLogCallback(folder, read_rules(args.alerts), follows_arguments=True),
        *report,
        *trackers,
        *hub,
    ]


def last_callbacks(args: TrainingArguments) -> list[Any]:
    """The callbacks that are called after a script's own: one keeps the first rows of the data, and one shows the
    progress.
    """
    # The display comes last: it shows the logs as the script's callbacks have changed them.
    return [SamplesLog, PrinterCallback if args.disable_tqdm else _assigned("DEFAULT_PROGRESS_CALLBACK")]


def _assigned(name: str) -> Any:
    """The value that a name of this file has in the package, where scripts assign it."""
    return getattr(sys.modules[__name__.rpartition(".")[0]], name)


def one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    """Return the value given under either of two names; raise ConfigError if the values differ."""
    if value is not None and old_value is not None and value is not old_value:
        fix = f"it is the earlier name of `{name}`, which is given too: leave one out"
        raise ConfigError(Problem(old_name, "given", fix))
    return old_value if value is None else value


def listed_callbacks(callbacks: Any, callback: Any) -> list[Any]:
    """The callbacks of a script, given under either of two names. Raises ConfigError for one that is in no list."""
    given = one_of("callbacks", callbacks, "callback", callback)
    if given is not None and (isinstance(given, type) or not isinstance(given, Iterable)):
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        raise ConfigError(Problem("callbacks", name, f"give a list of callbacks: [{name}]"))
    return list(given or ())


_CALLED = {
    "data_collator": "a function or an object that makes a batch of a list of samples",
    "compute_loss_func": "a function of outputs, labels and num_items_in_batch that returns the loss",
    "compute_metrics": "a function of an EvalPrediction that returns a dict of numbers",
    "preprocess_logits_for_metrics": "a function of logits and labels",
    "model_init": "a function that returns the model",
}


def check_called(*given: Any) -> None:
    """Raise ConfigError for arguments of a Trainer, in the order above, that are to be called, and cannot be."""
    refuse(
        Problem(name, value, f"cannot be called: give {what}")
        for (name, what), value in zip(_CALLED.items(), given, strict=True)
        if value is not None and not callable(value)
    )


def pair_of_optimizers(given: Any) -> tuple[torch.optim.Optimizer | None, Any]:
    """Return the argument `optimizers` of a Trainer. Raises ConfigError if it is not a pair."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        fix = "give a pair, of an optimizer and a schedule: optimizers=(optimizer, None)"
        raise ConfigError(Problem("optimizers", type(given).__name__, fix))
    return given[0], given[1]


def default_collator(tokenizer: Any) -> Callable[[list[Any]], Any]:
    """Return a collator that pads if the tokenizer can pad, and stacks otherwise."""
    return DataCollatorWithPadding(tokenizer) if hasattr(tokenizer, "pad") else auto_collate


def place_model(model: nn.Module, device: torch.device) -> None:
    """Move the model to `device`, unless a device map has put its parts on several, or it has no weights yet."""
    device_map = getattr(model, "hf_device_map", None) or {}
    if not has_weights(model) or len(set(device_map.values())) > 1:
        return
    # One of few bits, which not every library moves, is usually where its loader put it.
    is_there = all(parameter.device == device for parameter in model.parameters())
    if getattr(model, "quantization_method", None) is None or not is_there:
        to_device(model, device)


def warn_of_keys(model: nn.Module, result: Any) -> None:
    """Warn of the keys that `load_state_dict` of a script reported missing or unexpected. Weights that the model never
    saves are tied to others.
    """
    if result.missing_keys and set(result.missing_keys) == set(
        getattr(model, "_keys_to_ignore_on_save", None) or ()
    ):
        model.tie_weights()  # type: ignore[operator]
    elif result.missing_keys:
        logger.warning("the checkpoint lacks weights of the model: %s", result.missing_keys)
    if result.unexpected_keys:
        logger.warning("the checkpoint has weights that the model lacks: %s", result.unexpected_keys)


def align_special_tokens(model: nn.Module, tokenizer: Any) -> None:
    """Copy the tokenizer's special tokens into the configurations of the model and of its generation."""
    changed = {}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            # By default the value itself: a configuration without this field does not get one.
            given = getattr(config, name, value)
            # A configuration may list several tokens that end a text.
            is_listed = isinstance(given, (list, tuple)) and value in given
            if value is not None and config is not None and given != value and not is_listed:
                setattr(config, name, value)
                changed[name] = value
    if changed:
        logger.info("set the tokenizer's special tokens in the model's configuration: %s", changed)


def retention_of(plan: SavePlan) -> Retention:
    """Which checkpoints of a run are kept, besides the best, which are protected one by one."""
    if plan.keep_best is not None and plan.keep_last is None:
        return Retention(last=1)  # a run resumes from the newest, which need not be one of the best
    return Retention(limit=plan.total_limit, last=plan.keep_last)


def warn_of_spare_devices(world: World, device: torch.device) -> None:
    """Log if this machine has more accelerators than the job uses."""
    total = visible_devices()
    if device.type not in ("cpu", "mps") and total > world.local_size and world.is_local_main:
        logger.warning(
            "%d accelerators are visible and this job uses %d. To use them all, start the script with: "
            "torchrun --nproc-per-node %d SCRIPT",
            total,
            world.local_size,
            total,
        )
