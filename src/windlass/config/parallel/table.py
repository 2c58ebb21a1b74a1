"""All settings, indexes of them by their spellings, and the spelling of each in every place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from windlass.config.parallel import (
    rows_compute,
    rows_deepspeed,
    rows_launch,
    rows_training,
)
from windlass.config.parallel.keys import FAMILIES, Key, Settings
from windlass.config.parallel.rows_deepspeed import FIELDS, config_of, fields_in_config

TRAINING = (
    *rows_training.RUN,
    *rows_training.FSDP,
    *rows_training.MESH,
    *rows_training.DDP,
    *rows_compute.COMPILE,
    *rows_compute.FLOAT8,
    *rows_deepspeed.DEEPSPEED,
)
# Families that are refused as a whole, because what they configure is not built.
UNBUILT = rows_launch.MEGATRON
KEYS: dict[str, Key] = {
    key.name: key for key in (*TRAINING, *rows_launch.LAUNCH, *rows_launch.DEEPSPEED, *UNBUILT)
}
FLAGS: dict[str, Key] = {word: key for key in KEYS.values() for word in key.flags}
VARIABLES: dict[str, Key] = {word: key for key in TRAINING for word in key.variables}


def words_of(section: str) -> dict[str, Key]:
    """Every spelling inside a section of a launch file ("" is its top level), with and without the flag's prefix."""
    found: dict[str, Key] = {}
    for key in KEYS.values():
        family = FAMILIES[key.family]
        if family.section == section:
            found.update({prefix + word: key for word in key.words for prefix in ("", family.flag or "")})
    return found


SECTIONS: dict[str, dict[str, Key]] = {
    family.section: words_of(family.section) for family in FAMILIES.values() if family.section
}
# Files of accelerate have it in this section too.
SECTIONS["deepspeed_config"]["gradient_accumulation_steps"] = rows_training.ACCUMULATION
UNBUILT_SECTIONS = {FAMILIES[key.family].section for key in UNBUILT}
TOP_LEVEL = words_of("")


# Every spelling of a setting, but for keys of a launch file's sections; where two settings share one, the first counts.
SPELLINGS: dict[str, Key] = {
    **{field: key for key in reversed(KEYS.values()) for field in key.fields},
    **FLAGS,
    **VARIABLES,
    **KEYS,
}


def values_for(settings: Settings, start: str, kind: type) -> dict[str, Any]:
    """The values of the settings `start.NAME` for those NAMEs that are fields of dataclass `kind`."""
    names = {field.name for field in dataclasses.fields(kind)}
    found = {key.name.partition(".")[2]: key for key in KEYS.values() if key.name.startswith(f"{start}.")}
    return {name: settings.value(key) for name, key in found.items() if name in names}


def to_arguments(key: Key, value: Any) -> dict[str, Any]:
    """The fields of `TrainingArguments` that set a value; empty for settings of a launcher alone."""
    if key.name == "strategy":
        return {"fsdp": value == "fsdp", **({"deepspeed": config_of({})} if value == "deepspeed" else {})}
    if key.name == "precision":
        return {field: value == field for field in key.fields}
    if key in FIELDS:
        return {"deepspeed": fields_in_config({key.name: value})}
    if section := {"fsdp": "fsdp_config", "fp8": "fp8_config", "mesh": "parallelism_config"}.get(key.family):
        return {section: {key.words[0]: list(value) if isinstance(value, tuple) else value}}
    return {key.fields[0]: value} if key.fields else {}


def spellings(key: Key) -> Iterator[tuple[str, str]]:
    """(place, spelling) for each place where a setting can be set."""
    if key.flags:
        yield "flag", f"--{key.flags[0]}"
    yield "file", key.in_file
    if key.variables:
        yield "variable", key.variables[0]
    if arguments := to_arguments(key, key.default):
        inside = [
            f"{name}={{{key.words[0]!r}: ...}}" for name, said in arguments.items() if isinstance(said, dict)
        ]
        yield "arguments", ", ".join(inside or key.fields or arguments)
        yield "recipe", f"parallel.{key.name}"
