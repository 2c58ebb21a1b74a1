"""The `windlass` command. Nothing heavy is imported before a subcommand runs, so that `--help` is fast."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence

from windlass import __version__
from windlass.cli.command_line import (
    ERROR_FILE_VARIABLE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    CommandParser,
    answer,
)
from windlass.core.activity import Activity
from windlass.core.errors import WindlassError
from windlass.core.job_signals import surviving_hangup
from windlass.core.lazy import import_torch_uncollected
from windlass.core.output import STDOUT, flush_standard_streams, say
from windlass.core.terminal import folded_message
from windlass.recipes.quiet import quiet_libraries

# Their result is in files.
_TRAINING = (["train"], ["run"], ["launch"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 2 for a user error or an answer that could not be written, 75 if
    preempted, 130 if interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    STDOUT.was_lost = False
    # The interpreter's last collections look at every object of the libraries: a second in which nothing happens.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    import_torch_uncollected()
    # These two run a user's script, here or in other processes.
    quiet = contextlib.nullcontext() if arguments[:1] in (["run"], ["launch"]) else quiet_libraries()
    try:
        with (
            quiet,
            surviving_hangup() if arguments[:1] in (["train"], ["launch"]) else contextlib.nullcontext(),
        ):
            code = _dispatch(arguments)
            # What others print is their result: a file that a full disk cut short must not be taken for it.
            if code == 0 and STDOUT.was_lost and arguments[:1] not in _TRAINING:
                return EXIT_USER_ERROR
            return code
    except WindlassError as error:
        if not _left_to_launcher(error):
            say(folded_message(f"windlass: {error}"), error=True)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        say("windlass: interrupted", error=True)
        return EXIT_INTERRUPTED
    except OSError as error:
        # It names the file that a command reads or writes. That of a training may come from anywhere: show the calls.
        if arguments[:1] in _TRAINING:
            raise
        say(f"windlass: {error}", error=True)
        return EXIT_USER_ERROR
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


# Module, function, and help. A function takes the words after the command and returns the exit code; a module has a
# `build_parser()` as well.
COMMANDS = {
    "train": ("train_command", "train_command", "train a model as a recipe configures it"),
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
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "version":
        return answer(options, {"version": __version__}, [f"windlass {__version__}"])
    parser.print_help()
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(prog="windlass", description="Train PyTorch models, and never lose a step.")
    parser.add_argument("--version", action="version", version=f"windlass {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, _, help_) in COMMANDS.items():
        commands.add_parser(name, help=help_, add_help=False)
    version = commands.add_parser("version", help="print the version of Windlass")
    version.add_argument("--json", action="store_true", help="as one JSON object")
    return parser
