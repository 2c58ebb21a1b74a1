"""The `windlass` command. Nothing heavy is imported before a subcommand runs, so that `--help` is fast."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from windlass import __version__
from windlass.cli.command_line import (
    ERROR_FILE_VARIABLE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    CommandParser,
    TrainOptions,
    answer,
    names_and_overrides,
)
from windlass.core.activity import Activity
from windlass.core.errors import WindlassError, nearest
from windlass.core.job_signals import surviving_hangup
from windlass.core.output import flush_standard_streams, say
from windlass.core.terminal import folded_message
from windlass.recipes.built_in_recipes import is_recipe
from windlass.recipes.quiet import quiet_libraries

TRAIN_HELP = """\
Train a model as a recipe configures it. Without a recipe: a small language model on English text that every Python
installation carries, in under two minutes on two CPU cores.

  windlass train
  windlass train shakespeare data.train=my.txt training.max_steps=500
  windlass train my.yaml --resume
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 2 for a user error, 75 if preempted, 130 if interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The interpreter's last collections look at every object of the libraries: a second in which nothing happens.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    # These two run a user's script, here or in other processes.
    quiet = contextlib.nullcontext() if arguments[:1] in (["run"], ["launch"]) else quiet_libraries()
    try:
        with (
            quiet,
            surviving_hangup() if arguments[:1] in (["train"], ["launch"]) else contextlib.nullcontext(),
        ):
            return _dispatch(arguments)
    except WindlassError as error:
        if not _left_to_launcher(error):
            say(folded_message(f"windlass: {error}"), error=True)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        say("windlass: interrupted", error=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # of argparse, into `| head`
        return 0
    finally:
        flush_standard_streams()


def _left_to_launcher(error: WindlassError) -> bool:
    """Write an error of a later process of a job into the file that its launcher reads: most often all have the same
    one, and the first prints it. Return False in other processes.
    """
    if os.environ.get("RANK", "0") == "0" or not os.environ.get(ERROR_FILE_VARIABLE):
        return False
    from windlass.cli.launching.worker import record

    record(error, os.environ)
    return True


# Commands that parse their arguments themselves: module, function, and help. A module has a `build_parser()` as well.
COMMANDS = {
    "recipes": ("recipes_command", "recipes_command", "list the built-in recipes"),
    "init": ("init_command", "init_command", "copy a built-in recipe into a file of your own"),
    "schema": ("recipe_schema", "schema_command", "print the JSON schema of recipes, for editors"),
    "generate": ("generate_command", "generate_command", "continue a prompt with a trained model"),
    "chat": ("chat_command", "chat_command", "talk to a trained model"),
    "evaluate": ("evaluate_command", "evaluate_command", "measure a trained model on tasks of lm_eval"),
    "launch": ("launch_command", "launch_command", "start a script in many processes"),
    "run": ("run_command", "run_command", "run a script of transformers or accelerate on this engine"),
    "compare": ("compare_command", "compare_command", "compare a script's first updates with those on this engine"),
    "config": ("config_command", "config_command", "write the file that a launch reads"),
    "convert-config": ("convert_config", "convert_command", "turn a TRL, Axolotl or LLaMA-Factory file into a recipe"),
    "explain": ("explain", "explain_command", "print what an argument means, its value and its source"),
    "prove": ("prove_command", "prove_command", "prove that a layout computes what one process does"),
    "plan": ("plan_command", "plan_command", "predict memory, traffic and time of a run before it starts"),
    "test": ("selftest", "selftest_command", "check that this installation trains in two processes"),
    "estimate-memory": ("estimate_memory", "estimate_memory_command", "estimate the memory that a model needs"),
    "checkpoint": ("checkpoint", "checkpoint_command", "list, verify, compare, export and remove checkpoints"),
    "data": ("data_command", "data_command", "show or prepare what a model is trained on"),
    "status": ("status_command", "status_command", "print the state of a run, and what would be lost if it died now"),
    "ps": ("ps_command", "ps_command", "list the runs below a folder, with their state"),
    "report": ("report_command", "report_command", "write the report of runs from their folders"),
    "ui": ("ui_command", "ui_command", "serve the page of the runs below a folder, which follows them"),
    "merge-weights": ("merge_weights", "merge_weights_command", "merge sharded weights into one file"),
    "completion": ("completion", "completion_command", "print the completions of a shell"),
    "env": ("environment_command", "environment_command", "print versions and devices, for a bug report"),
}  # fmt: skip


# What a command is doing that may take seconds; the import of its libraries alone does.
_ACTIVITIES = {
    "checkpoint": "reading checkpoints", "data": "reading the data", "env": "looking at packages and devices",
    "estimate-memory": "building the model without its weights", "report": "drawing the report",
    "merge-weights": "merging weights", "plan": "running one update without weights",
}  # fmt: skip


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        name, words = arguments[0], arguments[1:]
        module, function, _ = COMMANDS[name]
        with Activity(_ACTIVITIES[name]) if name in _ACTIVITIES else contextlib.nullcontext():
            command = getattr(importlib.import_module(f"windlass.cli.{module}"), function)
            return int(command(words))
    parser, train = parsers()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "train":
        chosen = _train_options(options, rest, arguments, train)
        if chosen.search is not None:
            from windlass.cli.recipe_search import search_command

            return search_command(chosen)
        from windlass.cli.train import train_command

        return train_command(chosen, arguments)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "version":
        return answer(options, {"version": __version__}, [f"windlass {__version__}"])
    parser.print_help()
    return 0


def parsers() -> tuple[CommandParser, CommandParser]:
    parser = CommandParser(prog="windlass", description="Train PyTorch models, and never lose a step.")
    parser.add_argument("--version", action="version", version=f"windlass {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train", help="train a model as a recipe configures it", description=TRAIN_HELP
    )
    add = train.add_argument
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
    for name, (_, _, help_) in COMMANDS.items():
        commands.add_parser(name, help=help_, add_help=False)
    version = commands.add_parser("version", help="print the version of Windlass")
    version.add_argument("--json", action="store_true", help="as one JSON object")
    return parser, train


def _train_options(
    options: argparse.Namespace, rest: list[str], arguments: Sequence[str], train: CommandParser
) -> TrainOptions:
    if flags := [word for word in rest if word.startswith("-")]:
        train.error(f"unrecognized arguments: {' '.join(flags)}{_as_keys(flags, arguments, train)}")
    # argparse collects positional arguments up to the first option only.
    words = [*options.words, *rest]
    resume = options.resume
    # `--resume key=value` and `--resume recipe.yaml` name no checkpoint.
    is_word = isinstance(resume, str) and (is_recipe(resume) or "=" in resume)
    if is_word and not os.path.isdir(resume):
        words.append(resume)
        resume = True
    recipes, overrides = names_and_overrides(words)
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
    return TrainOptions(
        recipe=recipes[0] if recipes else None,
        overrides=overrides,
        output_dir=options.output_dir,
        resume=resume,
        print_config=options.print_config or options.all,
        all_keys=options.all,
        dry_run=options.dry_run,
        tiny=options.tiny,
        json=options.json,
        search=options.search,
    )


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
