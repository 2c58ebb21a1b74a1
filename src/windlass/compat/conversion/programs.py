"""The programs whose configurations are converted: which one a file is of, and the recipe that it becomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from windlass.compat.conversion import axolotl, llama_factory, trl
from windlass.compat.conversion.shared import Conversion, ForeignConfig
from windlass.core.errors import ConfigError, Problem

# In this order: `model_name_or_path` is a key of the last two.
_PROGRAMS = {"Axolotl": axolotl, "LLaMA-Factory": llama_factory, "TRL": trl}


def convert(values: Mapping[str, Any], training_keys: Collection[str], folder: Path = Path()) -> Conversion:
    """Return the recipe of a configuration, and what is not in it. Raises ConfigError if the configuration is of none
    of the programs, or not of supervised fine-tuning.

    Args:
        training_keys: keys of the section `training`, which are taken over under their names.
        folder: of the file.
    """
    name = _program_of(values)
    _refuse_other_training(values)
    source, made = ForeignConfig(values, folder), Conversion(name)
    program = _PROGRAMS[name]
    try:
        program.convert(source, made)
    except ConfigError:
        raise
    # What it reads has the types of that program, which no schema of it tells.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fix = f"has a value of another type than {name} takes, or an item without a key that it needs ({error!r})"
        raise ConfigError(Problem("FILE", name, fix)) from error
    for key in source.unread():
        if key in training_keys:
            made.put(f"training.{key}", source.take(key))
    made.lose_rest(source, program.REASONS)
    if not _evaluates(made):
        made.put("data.eval_fraction", 0)  # a recipe holds out a part of the data by default
    if made.get("data.eval_fraction") == 0 and not (made.get("data.eval") or made.get("data.eval_split")):
        _drop_evaluations(made)
    return made


_OF_EVALUATIONS = (
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
)


def _drop_evaluations(made: Conversion) -> None:
    """Without data to evaluate on these programs do not evaluate, and a recipe that asks for it is refused."""
    training = made.recipe.get("training", {})
    for place, names in ((training, _OF_EVALUATIONS), (made.recipe, ("early_stopping",))):
        for name in names:
            if (value := place.pop(name, None)) not in (None, "no"):
                made.lost[name] = value, "there is no data to evaluate on"


def _program_of(values: Mapping[str, Any]) -> str:
    for name, program in _PROGRAMS.items():
        if any(sign in values for sign in program.SIGNS):
            return name
    signs_of = "; ".join(f"{name}: {', '.join(program.SIGNS)}" for name, program in _PROGRAMS.items())
    fix = f"is of none of the known programs, which have keys such as {signs_of}"
    raise ConfigError(Problem("FILE", sorted(values)[:8], fix))


def _refuse_other_training(values: Mapping[str, Any]) -> None:
    """`stage` is a key of LLaMA-Factory, `rl` one of Axolotl."""
    fix = "is another kind of training than supervised fine-tuning, which is all that is converted"
    for key, converted in (("stage", ("sft", None)), ("rl", (None, False, ""))):
        if values.get(key) not in converted:
            raise ConfigError(Problem(key, values[key], fix))


def _evaluates(made: Conversion) -> bool:
    named = any(made.get(f"data.{key}") is not None for key in ("eval", "eval_split", "eval_fraction"))
    return named or made.get("training.eval_strategy") not in (None, "no", False)
