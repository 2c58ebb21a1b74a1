"""What `windlass explain` says about the options of an adapter, which peft declares."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from windlass.core.optional import is_available

# What `windlass train` sets where a recipe does not.
_OWN_DEFAULTS = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def adapter_option(word: str) -> dataclasses.Field[Any] | None:
    """The option that `adapter.r`, `r`, `lora_r` or `lora_alpha` names; None if there is none, or no peft."""
    name = word.removeprefix("adapter.")
    if not is_available("peft"):
        return None
    from windlass.checkpoint.adapters import peft_library  # which imports torch

    options = {item.name: item for item in dataclasses.fields(peft_library("explain an option").LoraConfig)}
    return options.get(name) or options.get(name.removeprefix("lora_"))


def explain_option(
    option: dataclasses.Field[Any], given: Mapping[str, Any], origin: str | None
) -> Iterator[str]:
    """Yield the lines about one option.

    Args:
        given: the adapter of a recipe; empty without one.
        origin: where the recipe sets the option; None if it does not.
    """
    default = _OWN_DEFAULTS.get(option.name, option.default)
    yield f"adapter.{option.name} = {given.get(option.name, default)}"
    yield f"  from      {origin or 'its default'}"
    if origin is not None:
        yield f"  default   {default}"
    yield f"  means     {_first_sentence(option.metadata.get('help', ''))}"
    yield f"  type      {option.type}"
    yield "  tasks     sft"
    yield f"  python    peft.LoraConfig.{option.name}"
    yield f"  recipe    adapter.{option.name}"
    yield "  page      docs/fine-tuning.md"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.])\s", " ".join(text.split()), maxsplit=1)[0]
