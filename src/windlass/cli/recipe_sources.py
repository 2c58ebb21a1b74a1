"""Where the values of a recipe were set, for the record of its run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from typing import Any

from windlass.cli.argument_table import Argument, all_arguments
from windlass.cli.built_in_recipes import FOLDER
from windlass.cli.launching.from_files import from_recipe
from windlass.cli.recipe_draft import RecipeDraft
from windlass.cli.schema import Recipe
from windlass.cli.tasks import TASKS
from windlass.config.arguments import TrainingArguments, describe, note_sources
from windlass.config.parallel.table import KEYS, to_arguments

# Of values that no key of the recipe sets: a task has defaults of its own, and a run needs a folder.
_COMMAND, _SEARCH = "windlass train", "the search"


def note_recipe(
    args: TrainingArguments, recipe: Recipe, draft: RecipeDraft, *, chosen: Collection[str] = ()
) -> None:
    """Record in the arguments of a recipe where each was set, and which of its other keys differ from their defaults.

    Args:
        chosen: dotted keys that a search chose, which are overrides of the recipe.
    """
    sources = {f"training.{name}": place for name, place in _training(args, recipe, draft)}
    others = {argument.dotted: (value, _origin(draft, argument)) for argument, value in _others(recipe)}
    sources |= dict.fromkeys(chosen, _SEARCH)
    others |= {name: (others[name][0], _SEARCH) for name in chosen if name in others}
    of_training = {name.removeprefix("training."): _shown(place) for name, place in sources.items()}
    note_sources(args, of_training, {name: (value, _shown(place)) for name, (value, place) in others.items()})


def _shown(origin: str) -> str:
    """A place in a built-in recipe by its name alone: `python-docs.yaml:12`."""
    return origin.removeprefix(f"{FOLDER}{os.sep}")


def _training(args: TrainingArguments, recipe: Recipe, draft: RecipeDraft) -> Iterator[tuple[str, str]]:
    spread = dict(_parallel(recipe, draft))
    of_task = TASKS[recipe.task].training_defaults(recipe)
    for name, _, is_default in describe(args):
        if not is_default:
            unset = f"task {recipe.task}" if name in of_task else _COMMAND
            yield name, draft.origin("training", name) or spread.get(name) or unset


def _parallel(recipe: Recipe, draft: RecipeDraft) -> Iterator[tuple[str, str]]:
    """Yield the arguments that the section `parallel` sets, and where."""
    for setting in from_recipe(recipe.parallel, "recipe").values():
        keys = ("parallel", *setting.key.split("."))
        origin = draft.origin(*keys) or draft.origin("parallel")
        if origin is not None:
            yield from ((name, origin) for name in to_arguments(KEYS[setting.key], setting.value))


def _others(recipe: Recipe) -> Iterator[tuple[Argument, Any]]:
    """Yield the keys outside `training` whose values differ from their defaults."""
    for argument in all_arguments(recipe.task):
        if argument.is_training or argument.keys[0] == "parallel":
            continue
        value: Any = recipe
        for name in argument.keys:
            value = getattr(value, name, None)
        if not is_dataclass(value) and value is not None and value != argument.default:
            yield argument, value


def _origin(draft: RecipeDraft, argument: Argument) -> str:
    """Return where a key, or the section that it is in, was set."""
    depths = range(len(argument.keys), 0, -1)
    return next((found for depth in depths if (found := draft.origin(*argument.keys[:depth]))), _COMMAND)
