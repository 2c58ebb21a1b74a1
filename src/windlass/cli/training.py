"""The sections `training` of a recipe, any field of `TrainingArguments`, and `parallel`, settings of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from windlass.cli.launching.from_files import from_recipe
from windlass.cli.recipe_draft import RecipeDraft
from windlass.cli.tasks import TASKS
from windlass.config.arguments import TrainingArguments
from windlass.config.parallel.keys import Setting
from windlass.config.parallel.rows_deepspeed import CONFIG, FIELDS
from windlass.config.parallel.rows_training import STRATEGY
from windlass.config.parallel.table import KEYS, to_arguments
from windlass.config.values import coerce
from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import local_folder

_ONLY_AT_LAUNCH = "is set when the processes are started: `windlass launch` with the flag or a launch file"


def training_fields() -> list[str]:
    """Return the keys of the `training` section of any task."""
    kinds: list[type[TrainingArguments]] = [TrainingArguments, *(task.arguments for task in TASKS.values())]
    return list(dict.fromkeys(item.name for kind in kinds for item in fields(kind) if item.init))


def common_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of a `training` section whose keys have the same meaning for every task, or for none."""
    of_tasks = set(training_fields()) - {item.name for item in fields(TrainingArguments)}
    return {name: value for name, value in values.items() if name not in of_tasks}


def coerced(values: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Convert text to the number or bool that a field requires."""
    return coerce(TASKS[task].arguments, values)


def training_arguments(values: Mapping[str, Any], task: str) -> TrainingArguments:
    """Return the arguments of a checked recipe, of the class that the task has."""
    return TASKS[task].arguments(**coerced(values, task))


def run_folder(args: TrainingArguments) -> Path:
    """Return the output folder, which a recipe always has."""
    assert args.output_dir is not None
    return local_folder(args.output_path)


def training_problems(values: Mapping[str, Any], task: str, draft: RecipeDraft) -> list[Problem]:
    """Return the problems that the task's arguments report, with the place in the recipe."""
    foreign = values.keys() & set(training_fields()) - {item.name for item in fields(TASKS[task].arguments)}
    if foreign:
        fix = f"has no meaning for task {task}; leave it out"
        return [Problem(draft.label("training", name), values[name], fix) for name in sorted(foreign)]
    try:
        training_arguments(values, task)
    except ConfigError as error:
        return [
            Problem(draft.label("training", *problem.field.split(".")), problem.value, problem.fix)
            for problem in error.problems
        ]
    return []


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, section by section; values of `other` replace those of `one`."""
    found = dict(one)
    for name, value in other.items():
        inner = found.get(name)
        found[name] = (
            _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
        )
    return found


def merge_parallel(
    training: Mapping[str, Any], parallel: Mapping[str, Any], draft: RecipeDraft
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the `training` section with the settings of `parallel` added, and the problems of the latter."""

    def problem(setting: Setting, fix: str) -> Problem:
        return Problem(draft.label("parallel", *setting.key.split(".")), setting.value, fix)

    settings = from_recipe(parallel, "recipe")
    problems = [
        Problem(draft.label(*found.field.partition(" in ")[0].split(".")), found.value, found.fix)
        for found in settings.problems
    ]
    joined = dict(training)
    if CONFIG.name in settings:
        fix = "configures DeepSpeed as a whole: set these values there, or leave it out"
        problems += [
            problem(found, f"contradicts parallel.{CONFIG.name}, which {fix}")
            for found in settings.explicit(*FIELDS)
        ]
    # The strategy first: what else is set of DeepSpeed replaces its defaults.
    for setting in sorted(settings.values(), key=lambda found: found.key != STRATEGY.name):
        if setting.key == STRATEGY.name and isinstance(joined.get("deepspeed"), str):
            continue  # a file has it all
        arguments = to_arguments(KEYS[setting.key], setting.value)
        if not arguments:
            problems.append(problem(setting, _ONLY_AT_LAUNCH))
        for name, value in arguments.items():
            if isinstance(value, dict):
                value = _merged(joined.get(name) or {}, value)
            elif joined.get(name, value) != value:
                problems.append(
                    problem(setting, f"contradicts training.{name}={joined[name]!r}; set only one")
                )
            joined[name] = value
    return joined, problems
