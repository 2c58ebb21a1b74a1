"""The arguments of a trainer of fine-tuning from whatever a script passes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from windlass.config.arguments import TrainingArguments
from windlass.config.sections.setting import default_of
from windlass.core.errors import ConfigError, Problem
from windlass.finetuning.base_model import name_of
from windlass.finetuning.tuning_config import TuningConfig

Config = TypeVar("Config", bound=TuningConfig)


def tuning_arguments(
    kind: type[Config], args: object, model: Any, values: dict[str, Any] | None = None
) -> Config:
    """Return the arguments as `kind`.

    Args:
        kind: such as `SFTConfig`; the default output folder ends with what comes before "Config" in its name.
        args: a `kind`; a `TrainingArguments`, whose values are kept; or None: the defaults, with an output folder named
            after the model.
        values: replace values of `args`.

    Raises:
        ConfigError: another type.
    """
    values = values or {}
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
