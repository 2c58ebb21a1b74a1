"""The `windlass` command. Nothing heavy is imported before a subcommand runs, so that `--help` is fast."""

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
from windlass.core.output import flush_standard_streams, say

TRAIN_HELP = """\
Train a model as a recipe configures it. Without a recipe: a small language model on English text that every Python
installation carries, in under two minutes on two CPU cores.

  windlass train
  windlass train recipes/shakespeare.yaml data.train=my.txt training.max_steps=500
  windlass train my.yaml --resume
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 2 for a user error, 75 if preempted, 130 if interrupted."""
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
    except BrokenPipeError:  # of argparse, into `| head`
        return 0
    finally:
        flush_standard_streams()


# Commands that parse their arguments themselves: module, function, and help.
_COMMANDS = {
    "launch": ("launch_command", "launch_command", "start a script in many processes"),
    "run": ("run_command", "run_command", "run a script of transformers or accelerate on this engine"),
    "config": ("config_command", "config_command", "write the file that a launch reads"),
    "convert-config": ("convert_config", "convert_command", "turn a TRL, Axolotl or LLaMA-Factory file into a recipe"),
    "explain": ("explain", "explain_command", "print the source of a setting's value"),
    "test": ("selftest", "selftest_command", "check that this installation trains in two processes"),
    "estimate-memory": ("estimate_memory", "estimate_memory_command", "estimate the memory of a model"),
    "checkpoint": ("checkpoint", "checkpoint_command", "list, verify, compare, export and remove checkpoints"),
    "data": ("data_command", "data_command", "show or prepare what a model is trained on"),
    "merge-weights": ("merge_weights", "merge_weights_command", "merge sharded weights into one file"),
    "env": ("environment_command", "environment_command", "print versions and devices, for a bug report"),
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
    if options.command == "version":
        say(f"windlass {__version__}")
    else:
        parser.print_help()
    return 0


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    description = "Train PyTorch models, and never lose a step."
    parser = argparse.ArgumentParser(prog="windlass", description=description)
    parser.add_argument("--version", action="version", version=f"windlass {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model as a recipe configures it",
        description=TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = train.add_argument
    add("words", nargs="*", metavar="RECIPE.yaml | key=value", help="a recipe, and overrides of its keys")
    add("--output-dir", metavar="DIR", help="where checkpoints, metrics and the report go")
    add(
        "--resume",
        nargs="?",
        const=True,
        metavar="CHECKPOINT",
        help="resume from the newest complete checkpoint of the output folder, or from the one given; "
        "auto: from the newest, or start if there is none",
    )
    add("--print-config", action="store_true", help="print the complete recipe, and exit")
    rehearse = "build everything, run two steps, an evaluation, a save and a load, and estimate the full run"
    add("--dry-run", action="store_true", help=rehearse)
    for name, (_, _, help_) in _COMMANDS.items():
        commands.add_parser(name, help=help_, add_help=False)
    commands.add_parser("version", help="print the version of Windlass")
    return parser, train


def _train_options(
    options: argparse.Namespace, rest: list[str], train: argparse.ArgumentParser
) -> TrainOptions:
    # argparse collects positional arguments up to the first option only.
    words = [*options.words, *rest]
    resume = options.resume
    # `--resume key=value` and `--resume recipe.yaml` name no checkpoint.
    is_word = isinstance(resume, str) and (resume.endswith((".yaml", ".yml")) or "=" in resume)
    if is_word and not os.path.isdir(resume):
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
