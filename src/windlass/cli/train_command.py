"""`windlass train`: the words of its command line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from windlass.cli.command_line import CommandParser, names_and_overrides
from windlass.cli.resume_words import names_checkpoint
from windlass.core.errors import nearest
from windlass.recipes.built_in_recipes import is_recipe

_HELP = """\
Train a model as a recipe configures it. Without a recipe: a small language model on English text that every Python
installation carries, in under two minutes on two CPU cores.

  windlass train
  windlass train shakespeare data.train=my.txt training.max_steps=500
  windlass train my.yaml --resume
"""


def train_command(words: Sequence[str]) -> int:
    options = read_options(words)
    if options.search is not None:
        from windlass.cli.recipe_search import search_command

        return search_command(options)
    from windlass.cli.train import train_by_recipe

    return train_by_recipe(options, ["train", *words])


def build_parser() -> CommandParser:
    parser = CommandParser(prog="windlass train", description=_HELP)
    add = parser.add_argument
    recipe = "a recipe (a file, or a name that `windlass recipes` lists), and overrides of its keys"
    add("words", nargs="*", metavar="RECIPE | key=value", help=recipe)
    add("--output-dir", metavar="DIR", help="where checkpoints, metrics and the report go")
    add(
        "--resume",
        nargs="?",
        const=True,
        metavar="CHECKPOINT",
        help="resume from the newest complete checkpoint of the output folder, or from the one given; "
        "auto: from the newest, or start if there is none",
    )
    add("--print-config", action="store_true", help="print the recipe with comments on its keys, and exit")
    add("--all", action="store_true", help="with --print-config: also the keys that are seldom set")
    rehearse = "build everything, run two steps, an evaluation, a save and a load, and estimate the full run"
    add("--dry-run", action="store_true", help=rehearse)
    add("--json", action="store_true", help="with --dry-run: print the estimate as one JSON object")
    tiny = "try the recipe here, in seconds: a tiny model with random weights, few rows and steps, on the CPU"
    add("--tiny", action="store_true", help=tiny)
    search = "train once for each set of values of a space, and list the trials (docs/search.md)"
    add("--search", metavar="SPACE.yaml", help=search)
    return parser


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line, with the `recipe` and the `overrides` that are among its words."""
    train = build_parser()
    options, rest = train.parse_known_args(words)
    if flags := [word for word in rest if word.startswith("-")]:
        train.error(f"unrecognized arguments: {' '.join(flags)}{_as_keys(flags, words, train)}")
    # Of a variable that is not set, as a rule: as if there were no flag, a run would start from its beginning.
    for flag, value in (("--resume", options.resume), ("--output-dir", options.output_dir)):
        if value == "":
            train.error(f"{flag} has an empty value; give a folder, or leave the flag out")
    resume = options.resume
    if sum(word == "--resume" or word.startswith("--resume=") for word in words) > 1:
        train.error("--resume is given twice; leave one out")
    if isinstance(resume, str) and f"--resume={resume}" not in words and not names_checkpoint(resume):
        at = words.index("--resume")  # without its word, which has its place among the overrides
        return read_options([*words[:at], *words[at + 1 :], "--resume"])
    # argparse collects positional arguments up to the first option only.
    recipes, options.overrides = names_and_overrides([*options.words, *rest])
    from windlass.recipes.schema import is_data

    for word in recipes:
        if is_data(word) and not is_recipe(word):
            train.error(f"{word} is data and not a recipe: write data.train={word}")
        if word.endswith(".py"):
            train.error(f"{word} is a script and not a recipe: python {word}, or windlass launch {word}")
    if len(recipes) > 1:
        train.error(f"one recipe at a time: {' '.join(recipes)}")
    if options.json and not options.dry_run:
        train.error("--json is for --dry-run; of a run that was started: windlass status RUN --json")
    options.recipe = recipes[0] if recipes else None
    options.print_config = options.print_config or options.all
    return options


def _as_keys(flags: list[str], arguments: Sequence[str], train: CommandParser) -> str:
    """Return how a recipe spells flags that are similar to its keys, to append to an error; empty for other flags."""
    from windlass.recipes.recipe import find_key

    keys = []
    for flag in flags:
        name, equals, value = flag.lstrip("-").partition("=")
        key = None if nearest(f"--{name}", train.flags()) else find_key(name.replace("-", "_"))
        if not equals:
            following = arguments[arguments.index(flag) + 1 :][:1]
            value = next(
                (word for word in following if not word.startswith("-") and "=" not in word), "VALUE"
            )
        keys += [f"{'.'.join(key)}={shlex.quote(value)}"] if key else []
    return f"; keys of a recipe have no dashes: write {' '.join(keys)}" if keys else ""
