"""`windlass explain KEY`: the meaning of a setting, the source of its value, and all its spellings."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from windlass.config.deepspeed import explained
from windlass.config.launch import launch_settings
from windlass.config.launch_flags import add_setting_flags
from windlass.config.nearest import did_you_mean
from windlass.config.parallel import dtype_plans, from_arguments, merge
from windlass.config.parallel.keys import Key
from windlass.config.parallel.rows_deepspeed import CONFIG
from windlass.config.parallel.rows_training import PRECISION
from windlass.config.parallel.settings import Setting, Settings
from windlass.config.parallel.spelling import spellings
from windlass.config.parallel.table import FLAGS, SPELLINGS
from windlass.core.errors import ConfigError, Problem
from windlass.core.output import say
from windlass.precision.dtypes import dtypes_of


def explain_command(words: list[str]) -> int:
    """Print one setting, or all that are set; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="windlass explain",
        allow_abbrev=False,
        description="Print the source of a setting's value. The flags and the launch file are those of a launch.",
    )
    add = parser.add_argument
    add("key", nargs="?", help="a setting in any of its spellings (default: all that are set)")
    add("--recipe", metavar="FILE", help="a recipe that is to be trained")
    add_setting_flags(parser)
    options = parser.parse_args(words)
    settings = launch_settings(options, os.environ)
    if options.recipe:
        settings = merge(_of_recipe(options.recipe), settings)
    say("\n".join(_all(settings) if options.key is None else explain(find_key(options.key), settings)))
    return 0


def find_key(word: str) -> Key:
    """Return the setting with this name, flag, variable, key of a launch file or field of arguments."""
    spelling = word.lstrip("-").replace("-", "_").removeprefix("TrainingArguments.").removeprefix("parallel.")
    last = spelling.rpartition(".")[2]
    key = SPELLINGS.get(spelling) or FLAGS.get(last)
    if key is None:
        hint = did_you_mean(spelling, SPELLINGS) or "; see: windlass launch --help"
        raise ConfigError(Problem("KEY", word, f"there is no such setting{hint}"))
    return key


def explain(key: Key, settings: Settings) -> Iterator[str]:
    """Yield the lines about one setting."""
    given = settings.get(key.name)
    yield f"{key.name} = {_text(settings.value(key))}"
    if given is None:
        yield "  from      its default"
    else:
        yield f"  from      {given.origin}{_note(given)}"
        for other in given.overridden:
            yield f"  over      {_text(other.value)} from {other.origin}{_note(other)}"
        yield f"  default   {_text(key.default)}"
    yield f"  means     {key.doc}"
    for remark in (key.refused and f"refused   {key.refused}", key.idle and f"but       {key.idle}"):
        if remark:
            yield f"  {remark}"
    if key is CONFIG and given is not None:
        for path, value, source in explained(given.value):
            yield f"  value     {path} = {_text(value)}{source and f'  # {source}'}"
    if key is PRECISION and not settings.problems:
        yield f"  dtypes    {dtypes_of(*dtype_plans(settings), 'as the model is loaded')}"
    for place, spelling in spellings(key):
        yield f"  {place:<9} {spelling}"
    for problem in settings.problems:
        yield f"  problem   {problem}"


def _all(settings: Settings) -> Iterator[str]:
    if not settings:
        yield "no settings given; all defaults apply"
    for name in sorted(settings):
        given = settings[name]
        yield f"{name} = {_text(given.value)}  # {given.origin}{_note(given)}"
    for problem in settings.problems:
        yield f"problem: {problem}"


def _note(given: Setting) -> str:
    return " (written by a tool by default; any other source overrides it)" if given.implicit else ""


def _of_recipe(path: str) -> Settings:
    from windlass.cli.recipe import load_recipe
    from windlass.cli.training import training_arguments

    recipe = load_recipe(path)
    return from_arguments(training_arguments(recipe.training, recipe.task))


def _text(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
