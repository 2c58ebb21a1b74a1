"""The arguments of an `SFTTrainer` from whatever a script passes."""

from __future__ import annotations

import dataclasses
from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.config.nearest import did_you_mean
from windlass.config.refusal import refuse
from windlass.config.sections.setting import default_of
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import warn_of_argument
from windlass.finetuning.base_model import name_of
from windlass.finetuning.sft_config import SFTConfig

# Keywords that the constructor of earlier versions of TRL took -> the fields of `SFTConfig` that replaced them.
_EARLIER = {
    **SFTConfig.EARLIER_NAMES,
    **{
        name: name
        for name in (
            "dataset_text_field",
            "packing",
            "eval_packing",
            "dataset_num_proc",
            "dataset_kwargs",
            "model_init_kwargs",
            "neftune_noise_alpha",
        )
    },
}


def sft_arguments(args: object, model: Any, earlier: dict[str, Any]) -> SFTConfig:
    """Return the arguments as `SFTConfig`.

    Args:
        args: an `SFTConfig`; a `TrainingArguments`, whose values are kept; or None: the defaults, with an output folder
            named after the model.
        earlier: keywords of the constructor in earlier versions, which replace values of `args`.

    Raises:
        ConfigError: another type, or an unknown keyword.
    """
    if args is None:
        name = name_of(model).rstrip("/").rpartition("/")[2]
        args = SFTConfig(f"{name or 'model'}-SFT")
    elif not isinstance(args, TrainingArguments):
        kind = f"{type(args).__module__}.{type(args).__qualname__}"
        raise ConfigError(
            Problem("args", kind, "give windlass.SFTConfig(...) or windlass.TrainingArguments(...)")
        )
    values = _checked(earlier)
    if isinstance(args, SFTConfig):
        return dataclasses.replace(args, **values) if values else args
    return _converted(args, values)


def _checked(earlier: dict[str, Any]) -> dict[str, Any]:
    refuse(
        Problem(
            name, type(value).__name__, f"SFTTrainer has no such argument{did_you_mean(name, list(_EARLIER))}"
        )
        for name, value in earlier.items()
        if name not in _EARLIER
    )
    if earlier:
        fields = ", ".join(f"{_EARLIER[name]}={value!r}" for name, value in earlier.items())
        warn_of_argument(f"arguments of SFTTrainer that are now in SFTConfig: use SFTConfig({fields})")
    return {_EARLIER[name]: value for name, value in earlier.items()}


def _converted(args: TrainingArguments, values: dict[str, Any]) -> SFTConfig:
    """An `SFTConfig` with the values of `args`; what a script's subclass adds to them is kept as attributes."""
    known = {field.name for field in dataclasses.fields(SFTConfig)}
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    # All fields, so that nothing that the script did not ask for is remarked on a second time.
    defaults = {f.name: default_of(f) for f in dataclasses.fields(SFTConfig)}
    converted = SFTConfig(**{**defaults, **{k: v for k, v in given.items() if k in known}, **values})
    for name in given.keys() - known:
        setattr(converted, name, given[name])
    return converted
