"""The `parallel` section of a recipe: the settings of `windlass launch`, said for the arguments of one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.cli.recipe_draft import RecipeDraft
from windlass.config.parallel import from_recipe
from windlass.config.parallel.settings import Setting
from windlass.config.parallel.spelling import to_arguments
from windlass.config.parallel.table import KEYS
from windlass.core.errors import Problem

_ONLY_AT_LAUNCH = "is said when the processes are started: `windlass launch` with the flag or a launch file"


def spread(
    training: Mapping[str, Any], parallel: Mapping[str, Any], draft: RecipeDraft
) -> tuple[dict[str, Any], list[Problem]]:
    """The `training` section with what `parallel` says, and what is wrong with the latter."""
    settings = from_recipe(parallel, "recipe")
    problems = [_placed(problem, draft) for problem in settings.problems]
    joined = dict(training)
    for setting in settings.values():
        fields = to_arguments(KEYS[setting.key], setting.value)
        if not fields:
            problems.append(_problem(draft, setting, _ONLY_AT_LAUNCH))
        for name, value in fields.items():
            if isinstance(value, dict):
                value = {**(joined.get(name) or {}), **value}
            elif joined.get(name, value) != value:
                fix = f"contradicts training.{name}={joined[name]!r}; say it in one of the two places"
                problems.append(_problem(draft, setting, fix))
            joined[name] = value
    return joined, problems


def _problem(draft: RecipeDraft, setting: Setting, fix: str) -> Problem:
    return Problem(draft.label("parallel", *setting.key.split(".")), setting.value, fix)


def _placed(problem: Problem, draft: RecipeDraft) -> Problem:
    keys = problem.field.partition(" in ")[0].split(".")
    return Problem(draft.label(*keys), problem.value, problem.fix)
