"""What `windlass explain` says about the options of an adapter, which peft declares."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from windlass.cli.argument_table import find_arguments
from windlass.cli.explanation import Explanation, as_text
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
) -> Explanation:
    """Explain one option.

    Args:
        given: the adapter of a recipe; empty without one.
        origin: where the recipe sets the option; None if it does not.
    """
    default = _OWN_DEFAULTS.get(
        option.name, None if option.default is dataclasses.MISSING else option.default
    )
    said = Explanation(f"adapter.{option.name}", given.get(option.name, default))
    said.add("from", origin or "its default")
    if origin is not None:
        said.add("default", as_text(default))
    said.add("means", _first_sentence(option.metadata.get("help", "")))
    said.add("type", str(option.type))
    said.add("tasks", find_arguments("adapter")[0].readers)
    said.add("python", f"peft.LoraConfig.{option.name}")
    said.add("recipe", f"adapter.{option.name}")
    said.add("page", ["docs/fine-tuning.md"])
    return said


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.])\s", " ".join(text.split()), maxsplit=1)[0]
