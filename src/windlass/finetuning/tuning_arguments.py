"""The arguments of a trainer of fine-tuning from whatever a script passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from windlass.config.accelerator_config import AcceleratorConfig
from windlass.config.arguments import TrainingArguments
from windlass.config.sections.setting import default_of
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.finetuning.base_model import name_of
from windlass.finetuning.tuning_config import TuningConfig
from windlass.text.tables import is_stream

logger = get_job_logger(__name__)

Config = TypeVar("Config", bound=TuningConfig)


def begin_tuning(
    kind: type[Config], args: object, model: Any, train_dataset: Any, values: dict[str, Any] | None = None
) -> Config:
    """Return the arguments as `kind`, after a check of the training dataset.

    Args:
        kind: such as `SFTConfig`; the default output folder ends with what comes before "Config" in its name.
        args: a `kind`; a `TrainingArguments`, whose values are kept; or None: the defaults, with an output folder named
            after the model.
        values: replace values of `args`.

    Raises:
        ConfigError: another type.
        ValueError, TypeError: there is no training dataset, or it cannot be prepared.
    """
    found = _as_kind(kind, args, model, values or {})
    _check_train_dataset(train_dataset)
    if is_stream(train_dataset):
        _read_on_each_rank(found)
    return found


def _as_kind(kind: type[Config], args: object, model: Any, values: dict[str, Any]) -> Config:
    if args is None:
        name = name_of(model).rstrip("/").rpartition("/")[2]
        args = kind(f"{name or 'model'}-{kind.__name__.removesuffix('Config')}")
    elif not isinstance(args, TrainingArguments):
        given = f"{type(args).__module__}.{type(args).__qualname__}"
        fix = f"give windlass.{kind.__name__}(...) or windlass.TrainingArguments(...)"
        raise ConfigError(Problem("args", given, fix))
    if isinstance(args, kind):
        return dataclasses.replace(args, **values) if values else args
    return _converted(kind, args, values)


def _converted(kind: type[Config], args: TrainingArguments, values: dict[str, Any]) -> Config:
    """A `kind` with the values of `args`; what a script's subclass adds to them is kept as attributes."""
    known = {field.name for field in dataclasses.fields(kind)}
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    # All fields, so that nothing that the script did not ask for is remarked on a second time.
    defaults = {f.name: default_of(f) for f in dataclasses.fields(kind)}
    converted = kind(**{**defaults, **{k: v for k, v in given.items() if k in known}, **values})
    for name in given.keys() - known:
        setattr(converted, name, given[name])
    return converted


def _check_train_dataset(dataset: Any) -> None:
    if dataset is None:
        raise ValueError("`train_dataset` is required")
    is_dataset = hasattr(dataset, "__iter__") or (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    )
    if isinstance(dataset, (str, bytes, Mapping)) or not is_dataset:
        splits = ", ".join(map(repr, dataset)) if isinstance(dataset, Mapping) else ""
        raise TypeError(
            "`train_dataset` must be a `Dataset` or `IterableDataset` of the package datasets, or a sequence of "
            f"mappings, got `{type(dataset).__name__}`"
            + (f"; pass one of its parts: {splits}" if splits else "")
        )


def _read_on_each_rank(args: TuningConfig) -> None:
    """Turn `dispatch_batches` off for a stream: rank 0 cannot join batches of several lengths."""
    config = args.accelerator_config
    if isinstance(config, AcceleratorConfig):
        if config.dispatch_batches:
            logger.warning("dispatch_batches=True does not apply to an IterableDataset; using False")
        config.dispatch_batches = False
