"""Run on several ranks: what runs of a recipe say to overrides of it."""

from __future__ import annotations

from pathlib import Path

from windlass.core.errors import WindlassError
from windlass.dist.gang import leave
from windlass.recipes.recipe import load_recipe, training_arguments
from windlass.recipes.tasks import TASKS


def train(path: str, overrides: list[str]) -> None:
    """Train by a recipe, as `windlass train` does, without its screen."""
    recipe = load_recipe(path, overrides, asks_libraries=True)
    args = training_arguments(recipe.training, recipe.task)
    task = TASKS[recipe.task]
    task.open_trainer(task.build_parts(recipe, args), args).train()


def main(path: Path, folder: Path, cases: dict[str, list[str]]) -> dict[str, str]:
    said = {}
    for name, overrides in cases.items():
        try:
            train(path, [*overrides, f"training.output_dir={folder / name}"])
            said[name] = ""
        except WindlassError as error:
            said[name] = str(error)
        leave()  # the next one has another layout
    return said
