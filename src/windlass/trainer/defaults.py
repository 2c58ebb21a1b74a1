"""What the Trainer does when the script leaves it open, as plain functions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from windlass.callbacks.flow import DefaultFlowCallback
from windlass.callbacks.metrics_log import MetricsLogCallback
from windlass.callbacks.printer import PrinterCallback
from windlass.callbacks.progress import ProgressCallback
from windlass.callbacks.tracking import TrackingCallback
from windlass.checkpoint.nodes import Disks
from windlass.checkpoint.opening import open_store
from windlass.checkpoint.remote import RemoteFolder, check_remote
from windlass.checkpoint.retention import Retention
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import SavePlan
from windlass.core.device import visible_devices
from windlass.core.errors import ConfigError, Problem
from windlass.core.events import TrainerCallback
from windlass.core.locations import is_url, local_folder
from windlass.core.logs import get_logger
from windlass.core.redact import has_hidden
from windlass.core.rng import enable_full_determinism, set_seed
from windlass.core.world import World
from windlass.data.collators import DataCollatorWithPadding
from windlass.data.prepare import auto_collate
from windlass.dist.gang import Gang
from windlass.transforms.strategy import Strategy

logger = get_logger(__name__)


def checked_arguments(args: Any) -> TrainingArguments:
    """The arguments given, or those of a script that gives none.

    Raises:
        ConfigError: they are something else, such as a dict or another library's arguments.
    """
    if args is None:
        return TrainingArguments()
    if not isinstance(args, TrainingArguments):
        kind = f"{type(args).__module__}.{type(args).__qualname__}"
        fix = (
            "give windlass.TrainingArguments(...); a dict of options goes in as TrainingArguments(**options)"
        )
        raise ConfigError(Problem("args", kind, fix))
    return args


def seed_all(args: TrainingArguments) -> None:
    """Seed every generator as the arguments say."""
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)


class MakesModels(Protocol):
    """The part of a Trainer that makes models."""

    model_init: Callable[..., nn.Module] | None

    def call_model_init(self, trial: Any = None) -> nn.Module: ...


def first_model(model: Any, trainer: MakesModels) -> nn.Module:
    """The model given, or made by `model_init`.

    Raises:
        ConfigError: both are given, or neither, or the model is something else.
    """
    if (model is None) == (trainer.model_init is None):
        fix = "give exactly one of `model` and `model_init`"
        raise ConfigError(Problem("model", None if model is None else type(model).__name__, fix))
    model = trainer.call_model_init() if model is None else model
    if not isinstance(model, nn.Module):
        fix = "give an nn.Module; load a name first, as with AutoModelForCausalLM.from_pretrained(name)"
        raise ConfigError(Problem("model", type(model).__name__, fix))
    return model


def check_given(
    args: TrainingArguments, optimizers: tuple[Any, Any], cls_and_kwargs: Any, model_init: Any
) -> None:
    """Raise if the output folder cannot be opened, or if something contradicts an optimizer that a script brings.

    Raises:
        ConfigError: with all problems.
    """
    problems, given = remote_problems(str(args.output_dir)), optimizers[0] is not None
    if given and cls_and_kwargs is not None:
        problems.append(Problem("optimizers", "given", "leave out either it or optimizer_cls_and_kwargs"))
    if model_init is not None and (given or optimizers[1] is not None):
        fix = "model_init makes a new model at each train(), unknown to this optimizer; override create_optimizer"
        problems.append(Problem("optimizers", "given", fix))
    if problems:
        raise ConfigError(problems)


def default_callbacks(args: TrainingArguments, folder: Path) -> list[Any]:
    """The callbacks that come before a script's own."""
    trackers = [TrackingCallback(args.report_to)] if args.report_to else []
    return [DefaultFlowCallback, MetricsLogCallback(folder), *trackers]


def display_callback(args: TrainingArguments) -> type[TrainerCallback]:
    """What shows the progress of a run."""
    return PrinterCallback if args.disable_tqdm else ProgressCallback


def multiplied_parameters(model: nn.Module) -> int:
    """Parameters that take part in multiplications with every token: all but embedding tables, which are looked up.

    Source: N of Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(p.numel() for p in model.parameters() if id(p) not in tables)


def one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    """The value given under either of two names; both are a contradiction."""
    if value is not None and old_value is not None and value is not old_value:
        raise ConfigError(
            Problem(
                old_name, "given", f"it is the earlier name of `{name}`, which is given too: leave one out"
            )
        )
    return old_value if value is None else value


def default_collator(tokenizer: Any) -> Callable[[list[Any]], Any]:
    """Padding where there is a tokenizer that pads, else stacking."""
    return DataCollatorWithPadding(tokenizer) if hasattr(tokenizer, "pad") else auto_collate


def checked_collator(collator: Any, tokenizer: Any) -> Callable[[list[Any]], Any]:
    """The collator given, or the default one.

    Raises:
        ConfigError: what was given cannot be called.
    """
    if collator is not None and not callable(collator):
        fix = "give a function or an object that makes a batch of a list of samples"
        raise ConfigError(Problem("data_collator", collator, fix))
    return collator or default_collator(tokenizer)


def is_placed(model: nn.Module) -> bool:
    """Whether the model's parts were put on devices by someone else already (a device map, a quantized loader)."""
    device_map = getattr(model, "hf_device_map", None)
    return (device_map is not None and len(set(device_map.values())) > 1) or getattr(
        model, "quantization_method", None
    ) is not None


def align_special_tokens(model: nn.Module, tokenizer: Any) -> None:
    """Give the model's and its generation's configuration the tokenizer's special tokens."""
    changed = {}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if value is not None and config is not None and getattr(config, name, value) != value:
                setattr(config, name, value)
                changed[name] = value
    if changed:
        logger.info("the model's configuration takes the tokenizer's special tokens: %s", changed)


def retention_of(plan: SavePlan) -> Retention:
    """Which checkpoints of a run stay; the best of it are protected one by one."""
    if plan.keep_best is not None and plan.keep_last is None:
        return Retention(last=1)
    return Retention(limit=plan.total_limit, last=plan.keep_last)


def warn_of_spare_devices(world: World, device: torch.device) -> None:
    """Log if this machine has more accelerators than the job uses."""
    total = visible_devices()
    if device.type not in ("cpu", "mps") and total > world.local_size and world.is_local_main:
        logger.warning(
            "%d accelerators are visible and this job uses %d. To use them all, start the script with: "
            "torchrun --nproc-per-node %d SCRIPT", total, world.local_size, total
        )  # fmt: skip


def check_writable(output_dir: str, shown: str | None = None) -> None:
    """Make the output folder if need be, and write a page to it and away again.

    Args:
        shown: as the user wrote it.

    Raises:
        ConfigError: it can't be written.
    """
    probe = os.path.join(output_dir, ".windlass-write-test")
    try:
        os.makedirs(output_dir, exist_ok=True)
        try:
            with open(probe, "wb") as file:
                file.write(bytes(4096))  # an empty file fits on a full disk too
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):
                os.unlink(probe)
    except OSError as error:
        raise unwritable(shown or output_dir, error) from error


def unwritable(output_dir: str, error: OSError) -> ConfigError:
    """The output folder's refusal as a problem of the configuration."""
    fix = (
        f"it can't be written ({error.strerror or error}): choose another folder, or make room and permission"
    )
    return ConfigError(Problem("output_dir", output_dir, fix))


def agree_on_output(gang: Gang, output_dir: str, resuming: bool) -> None:
    """Make the output folder, on the main process for all.

    Raises:
        ConfigError: it can't be written; on every rank, so that none waits for one that has gone.
    """
    fix = None
    if gang.rank == 0:
        try:
            prepare_output(output_dir, resuming)
        except ConfigError as error:
            fix = error.problems[0].fix
    fix = gang.broadcast_object(fix)
    if fix is not None:
        raise ConfigError(Problem("output_dir", output_dir, fix))


def remote_problems(output_dir: str) -> list[Problem]:
    """What keeps a URL from being opened at all: an unknown kind of folder, or a package that is not installed."""
    try:
        if is_url(output_dir):
            if has_hidden(output_dir):
                fix = (
                    "its credentials were taken out when the arguments were written; give the whole URL again"
                )
                return [Problem("output_dir", output_dir, fix)]
            RemoteFolder(output_dir)
    except ConfigError as error:
        return error.problems
    return []


def check_disks(disks: Disks, strategy: Strategy, on_each_node: bool) -> None:
    """Refuse to bring whole weights to one process where the others' machines could not read them again.

    Args:
        on_each_node: the final model is wanted on every disk.

    Raises:
        ConfigError: naming the setting to change.
    """
    if disks.nodes == 1 or not strategy.sharded:
        return
    if on_each_node:
        fix = "sharded weights come together on the first process alone: leave it off, and copy what save_model() wrote"
        raise ConfigError(Problem("save_on_each_node", True, fix))
    if not strategy.saves_parts:
        fix = (
            f"output_dir lies on {disks.nodes} disks, and a checkpoint of whole tensors would lie on the first alone: "
            "use SHARDED_STATE_DICT, or an output_dir that all machines share"
        )
        raise ConfigError(Problem("fsdp_config.state_dict_type", "FULL_STATE_DICT", fix))


def prepare_output(output_dir: str, resuming: bool) -> None:
    """Make the output folder, and warn where it holds another run.

    Raises:
        ConfigError: it can't be written.
    """
    check_writable(str(local_folder(output_dir)))
    if is_url(output_dir):
        check_remote(output_dir)
        logger.info(
            "%s: the run works in %s, which WINDLASS_STAGING moves", output_dir, local_folder(output_dir)
        )
    earlier = [] if resuming else open_store(output_dir).committed()
    if earlier:
        newest, others = earlier[-1].path.name, len(earlier) - 1
        logger.warning(
            "%s holds another run (%s%s), and this is a fresh one. Its checkpoints count as older than this run's: "
            "save_total_limit and keep_last remove them first, one of the same step is replaced, and from this run's "
            "first save on resume_from_checkpoint=True continues this run. To keep both, choose another output_dir",
            output_dir, newest, f" and {others} more" if others else ""
        )  # fmt: skip
