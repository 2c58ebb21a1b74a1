"""The `windlass` command. Nothing heavy is imported before a subcommand runs, so `--help` answers at once."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from windlass import __version__
from windlass.cli.command_line import EXIT_INTERRUPTED, EXIT_USER_ERROR, TrainOptions
from windlass.core.errors import WindlassError
from windlass.core.job_signals import surviving_hangup
from windlass.core.output import say, settle

TRAIN_HELP = """\
Train a model as a recipe says. Without a recipe: a small language model on English text that every Python
installation carries, in under two minutes on two CPU cores.

  windlass train
  windlass train recipes/shakespeare.yaml data.train=my.txt training.max_steps=500
  windlass train my.yaml --resume
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 well, 2 an error of the user's to mend, 75 asked to leave by a
    scheduler, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with surviving_hangup() if arguments[:1] in (["train"], ["launch"]) else contextlib.nullcontext():
            return _dispatch(arguments)
    except WindlassError as error:
        say(f"windlass: {error}", error=True)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        say("windlass: interrupted", error=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # what argparse printed, into `| head`
        return 0
    finally:
        settle()


# Commands that read their words themselves: module, function, and what `windlass --help` says of them. The last words
# of a launch belong to its script.
_COMMANDS = {
    "launch": ("launch_command", "launch_command", "start a script in many processes"),
    "config": ("config_command", "config_command", "write the file that a launch reads"),
    "explain": ("explain", "explain_command", "where the value of a setting comes from"),
    "test": ("selftest", "selftest_command", "check that this installation trains in two processes"),
    "estimate-memory": ("estimate_memory", "estimate_memory_command", "what a model takes in memory"),
    "checkpoint": ("checkpoint", "checkpoint_command", "look at checkpoints, check, compare, export, remove them"),
    "merge-weights": ("merge_weights", "merge_weights_command", "weights in parts as one file"),
}  # fmt: skip


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in _COMMANDS:
        module, function, _ = _COMMANDS[arguments[0]]
        command = getattr(importlib.import_module(f"windlass.cli.{module}"), function)
        return int(command(arguments[1:]))
    parser, train = _parsers()
    options, rest = parser.parse_known_args(arguments)
    flags = [word for word in rest if word.startswith("-")]
    if flags or (rest and options.command != "train"):
        (train if options.command == "train" else parser).error(
            f"unrecognized arguments: {' '.join(flags or rest)}"
        )
    if options.command == "train":
        from windlass.cli.train import train_command

        return train_command(_train_options(options, rest, train), arguments)
    if options.command == "env":
        from windlass.cli.environment_command import environment_command

        return environment_command()
    if options.command == "version":
        say(f"windlass {__version__}")
        return 0
    parser.print_help()
    return 0


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="windlass", description="Train PyTorch models, and never lose a step."
    )
    parser.add_argument("--version", action="version", version=f"windlass {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model as a recipe says",
        description=TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument(
        "words", nargs="*", metavar="RECIPE.yaml | key=value", help="a recipe, and overrides of its keys"
    )
    train.add_argument("--output-dir", metavar="DIR", help="where checkpoints, metrics and the report go")
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="CHECKPOINT",
        help="go on from the newest whole checkpoint of the output folder, or from the one named; "
        "auto: from the newest, or afresh where there is none",
    )
    train.add_argument(
        "--print-config", action="store_true", help="print the whole recipe as it would run, and stop"
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, run two steps, an evaluation, a save and a load, and say what the full run takes",
    )
    for name, (_, _, help_) in _COMMANDS.items():
        commands.add_parser(name, help=help_, add_help=False)
    commands.add_parser("env", help="versions and devices, for a report of a problem")
    commands.add_parser("version", help="the version of Windlass")
    return parser, train


def _train_options(
    options: argparse.Namespace, rest: list[str], train: argparse.ArgumentParser
) -> TrainOptions:
    # argparse stops taking words at the first option between them; what it left over are words too.
    words = [*options.words, *rest]
    resume = options.resume
    if isinstance(resume, str) and _is_word(resume):
        # `--resume key=value` and `--resume recipe.yaml`: the word after the option is not its checkpoint.
        words.append(resume)
        resume = True
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        train.error(f"one recipe at a time: {' '.join(recipes)}")
    return TrainOptions(
        recipe=recipes[0] if recipes else None,
        overrides=[word for word in words if "=" in word],
        output_dir=options.output_dir,
        resume=resume,
        print_config=options.print_config,
        dry_run=options.dry_run,
    )


def _is_word(text: str) -> bool:
    return (text.endswith((".yaml", ".yml")) or "=" in text) and not os.path.isdir(text)
