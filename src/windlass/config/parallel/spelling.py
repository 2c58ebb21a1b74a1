"""The spelling of a setting in each place where it can be set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.config.parallel.keys import Key
from windlass.config.parallel.rows_deepspeed import FIELDS, config_of, fields_in_config


def to_arguments(key: Key, value: Any) -> dict[str, Any]:
    """The fields of `TrainingArguments` that set a value; empty for settings of a launcher alone."""
    if key.name == "strategy":
        return {"fsdp": value == "fsdp", **({"deepspeed": config_of({})} if value == "deepspeed" else {})}
    if key.name == "precision":
        return {field: value == field for field in key.fields}
    if key.family == "fsdp":
        return {"fsdp_config": {key.words[0]: list(value) if isinstance(value, tuple) else value}}
    if key.family == "fp8":
        return {"fp8_config": {key.words[0]: value}}
    if key in FIELDS:
        return {"deepspeed": fields_in_config({key.name: value})}
    if key.family == "mesh":
        return {"parallelism_config": {key.words[0]: value}}
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
