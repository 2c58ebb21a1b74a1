"""The `training` section of a recipe: any field of `TrainingArguments`, checked by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from windlass.cli.recipe_draft import RecipeDraft
from windlass.config.arguments import TrainingArguments
from windlass.config.documents import coerce
from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import local_folder


def training_fields() -> list[str]:
    """Names that the `training` section may hold."""
    return [item.name for item in fields(TrainingArguments) if item.init]


def coerced(values: Mapping[str, Any]) -> dict[str, Any]:
    """Text where a field wants a number or a truth value, read as such."""
    return coerce(TrainingArguments, values)


def training_arguments(values: Mapping[str, Any]) -> TrainingArguments:
    """The arguments of a checked recipe."""
    return TrainingArguments(**coerced(values))


def run_folder(args: TrainingArguments) -> Path:
    """Where the run keeps everything. A recipe always has one: it is named after its file."""
    assert args.output_dir is not None
    return local_folder(args.output_path)


def training_problems(values: Mapping[str, Any], draft: RecipeDraft) -> list[Problem]:
    """What `TrainingArguments` says about the section, with the place in the recipe."""
    try:
        training_arguments(values)
    except ConfigError as error:
        return [_placed(problem, draft) for problem in error.problems]
    return []


def _placed(problem: Problem, draft: RecipeDraft) -> Problem:
    return Problem(draft.label("training", *problem.field.split(".")), problem.value, problem.fix)
