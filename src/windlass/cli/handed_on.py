"""Sections of a recipe that another library reads, checked against what that library declares, before any work.

Their keys are not in the schema, so a wrong one would surface where the library reads it: after the data is prepared,
and with the library's own traceback.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from windlass.cli.modelling import base_config, config_of
from windlass.cli.schema import Recipe
from windlass.cli.task import Conflict
from windlass.config.nearest import did_you_mean
from windlass.config.values import members, type_fault
from windlass.core.errors import ConfigError
from windlass.core.optional import is_available

# peft writes these into an adapter that it saves; given, they would have no effect or break it.
_SET_BY_PEFT = ("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode")


def handed_on_faults(recipe: Recipe) -> Iterator[Conflict]:
    """Yield what the libraries that read `adapter`, `model.config` and `base.config` would refuse. A library that is
    not installed is not asked: its absence is an error of its own.
    """
    if recipe.adapter is not None and is_available("peft"):
        yield from _adapter_faults(recipe.adapter)
    if is_available("transformers"):
        if recipe.model.config and recipe.model.name is None:
            yield from _config_faults("model.config", recipe.model.config)
        if recipe.base is not None and recipe.model.name is None:
            yield from _config_faults("base.config", base_config(recipe.base.config))


def _adapter_faults(values: Mapping[str, Any]) -> Iterator[Conflict]:
    from windlass.checkpoint.adapters import peft_library  # which imports torch

    lora = peft_library("train an adapter").LoraConfig
    faults = [*declared_faults("adapter", values, lora), *_adapter_bounds(values)]
    faults += [
        (f"adapter.{name}", values[name], "is set by peft; leave it out")
        for name in _SET_BY_PEFT
        if name in values
    ]
    yield from faults
    if not faults:
        try:
            lora(**{"task_type": "CAUSAL_LM", **values})
        except Exception as error:  # what meets in its __post_init__, of any type
            yield "adapter", dict(values), " ".join(str(error).split())


def _adapter_bounds(values: Mapping[str, Any]) -> Iterator[Conflict]:
    """Ranges that peft checks only when it builds the layers."""
    ranks = {"r": values.get("r", 1)}
    if isinstance(values.get("rank_pattern"), Mapping):
        ranks |= {f"rank_pattern.{name}": rank for name, rank in values["rank_pattern"].items()}
    for name, rank in ranks.items():
        if name == "r" and not isinstance(rank, int):
            continue  # found by its declaration
        if not isinstance(rank, int) or rank < 1:
            yield f"adapter.{name}", rank, "must be a whole number of 1 or more"
    dropout = values.get("lora_dropout", 0)
    if isinstance(dropout, int | float) and not 0 <= dropout <= 1:
        yield "adapter.lora_dropout", dropout, "must be between 0 and 1"


def declared_faults(where: str, values: Mapping[str, Any], kind: type) -> Iterator[Conflict]:
    """Yield the keys that dataclass `kind` does not have, and the values of another type than it declares; a mapping
    for a field that is a dataclass itself is compared with that one.
    """
    hints = typing.get_type_hints(kind)
    known = [item.name for item in dataclasses.fields(kind) if item.init]
    for name, value in values.items():
        dotted = f"{where}.{name}"
        if name not in known:
            yield dotted, value, f"{kind.__name__} has no such option{_meant(str(name), known)}"
            continue
        kinds = [item for item in members(hints[name]) if isinstance(item, type)]
        inner = [item for item in kinds if dataclasses.is_dataclass(item)]
        if inner and isinstance(value, Mapping):
            yield from declared_faults(dotted, value, inner[0])
        elif not _is_numbered_word(value, hints[name]) and (fault := type_fault(value, hints[name])):
            yield dotted, value, fault


def _meant(name: str, known: list[str]) -> str:
    """Name the option that is meant. Flags and other programs write `lora_r` or `lora_rank` for `r`."""
    short = {"lora_rank": "r"}.get(name, name.removeprefix("lora_"))
    return f"; did you mean {short!r}?" if short in known else did_you_mean(name, known)


def _is_numbered_word(value: Any, hint: Any) -> bool:
    """Return True for `pissa_niter_4`, which peft declares as the word `pissa_niter_[number of iters]`."""
    words = [
        word
        for kind in members(hint)
        if typing.get_origin(kind) is typing.Literal
        for word in typing.get_args(kind)
    ]
    stems = [word.partition("[")[0] for word in words if isinstance(word, str) and "[" in word]
    return isinstance(value, str) and any(value.removeprefix(stem).isdecimal() for stem in stems)


def _config_faults(where: str, values: Mapping[str, Any]) -> Iterator[Conflict]:
    if not isinstance(values.get("model_type"), str):
        return  # reported as such by the task
    try:
        config_of(dict(values), {}, where)
    except ConfigError as error:
        # How sizes fit together is checked when the model is built: some follow from the data.
        if type(error.__cause__).__name__ == "StrictDataclassClassValidationError":
            return
        for problem in error.problems:
            yield problem.field, problem.value, problem.fix
